"""Write the modules beside the .proto files: `python -m manager.proto.generate`; `--check` only compares (for CI).

Generated code refuses to load under a protobuf or grpcio older than the tool that wrote it, so the oldest tool that
the dependencies allow writes it; the comparison is of descriptors and therefore works with any newer tool.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("deviceplugin", "podresources", "pluginregistration", "dra", "drahealth")
SOURCES = tuple(f"manager/proto/{name}.proto" for name in NAMES)
TOOL_VERSION = "1.80.0"
COMMAND = f"python -m manager.proto.generate   # with grpcio-tools=={TOOL_VERSION}"


def protoc(*arguments: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *arguments, *SOURCES], cwd=ROOT, check=True)


def stale() -> list[str]:
    """Sources whose committed module holds another descriptor than the .proto file gives."""
    from google.protobuf import descriptor_pb2

    with tempfile.NamedTemporaryFile() as file:
        protoc(f"--descriptor_set_out={file.name}")
        wanted = descriptor_pb2.FileDescriptorSet.FromString(Path(file.name).read_bytes())
    found = []
    for description in wanted.file:
        for message in description.message_type:
            for nested in (message, *message.nested_type):
                for field in nested.field:
                    field.ClearField("json_name")  # the Python module leaves it out
        module = importlib.import_module(description.name.removesuffix(".proto").replace("/", ".") + "_pb2")
        if descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb) != description:
            found.append(description.name)
    return found


def generate() -> None:
    """Write the modules beside their .proto files."""
    protoc("--python_out=.", "--pyi_out=.", "--grpc_python_out=.")
    for source in SOURCES:
        base = ROOT / source.removesuffix(".proto")
        for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
            path = base.with_name(base.name + suffix)
            path.write_text(f"# Generated: {COMMAND}\n{path.read_text()}")


def main() -> int:
    """Generate, or with --check compare with what is committed; 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if a module is stale")
    if parser.parse_args().check:
        outdated = stale()
        for source in outdated:
            print(f"{source}: its modules are stale; run {COMMAND}", file=sys.stderr)
        return 1 if outdated else 0
    installed = importlib.metadata.version("grpcio-tools")
    if installed != TOOL_VERSION:
        print(f"grpcio-tools is {installed}; install {TOOL_VERSION} (in a scratch environment)", file=sys.stderr)
        return 1
    generate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
