"""Functions, libraries and the linker of the simulated driver: what is loaded is found, described and gone after its unloading."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sim_cuda
from vcuda import sim

PTX = r"""
    def ptx(*names):
        return (".version 8.0\n.target sm_80\n.address_size 64\n" + "".join(
            f".visible .entry {name}(.param .u64 a, .param .u32 n) {{ ret; }}\n" for name in names)).encode() + b"\0"
    made = context()
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    return sim.Machine.create(tmp_path_factory.mktemp("functions") / "machine")


def test_a_library_shows_its_kernels_until_it_is_unloaded(machine: sim.Machine, tmp_path: Path) -> None:
    got = sim_cuda.run(
        machine,
        PTX
        + f"""
    path = {str(tmp_path / "two.ptx")!r}
    open(path, "wb").write(ptx("one", "two")[:-1])
    for library in (ok(cu.cuLibraryLoadData(ptx("one", "two"), [], [], 0, [], [], 0)),
                    ok(cu.cuLibraryLoadFromFile(path.encode(), [], [], 0, [], [], 0))):
        count = int(ok(cu.cuLibraryGetKernelCount(library)))
        names = sorted(ok(cu.cuKernelGetName(each)).decode() for each in ok(cu.cuLibraryEnumerateKernels(count, library)))
        kernel = ok(cu.cuLibraryGetKernel(library, b"two"))
        function = ok(cu.cuKernelGetFunction(kernel))
        launch(function); ok(cu.cuCtxSynchronize())
        missing = int(cu.cuLibraryGetKernel(library, b"three")[0])
        same = int(ok(cu.cuLibraryGetModule(library))) == int(ok(cu.cuFuncGetModule(function)))
        ok(cu.cuLibraryUnload(library))
    absent = int(cu.cuLibraryLoadFromFile(b"/no/such.ptx", [], [], 0, [], [], 0)[0])
    broken = int(cu.cuLibraryLoadData(b"no image at all\\0", [], [], 0, [], [], 0)[0])
    answer([count, names, missing, same, absent, bool(broken)])
    """,
    )
    assert got == [2, ["one", "two"], 500, True, 301, True]


def test_a_functions_parameters_and_attributes_are_those_of_its_image(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        PTX
        + """
    function = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx("one"))), b"one"))
    parameters = [[int(each) for each in ok(cu.cuFuncGetParamInfo(function, index))] for index in (0, 1)]
    beyond = int(cu.cuFuncGetParamInfo(function, 2)[0])
    F = cu.CUfunction_attribute
    shared, threads = F.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, F.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
    ok(cu.cuFuncSetAttribute(function, shared, 65536))
    refused = [int(cu.cuFuncSetAttribute(function, shared, 1 << 30)[0]), int(cu.cuFuncSetAttribute(function, threads, 5)[0])]
    ok(cu.cuFuncLoad(function))
    answer([ok(cu.cuFuncGetName(function)).decode(), parameters, beyond, int(ok(cu.cuFuncGetAttribute(shared, function))),
            refused, int(ok(cu.cuFuncGetAttribute(threads, function))), int(ok(cu.cuFuncIsLoaded(function)))])
    """,
    )
    assert got == ["one", [[0, 8], [8, 4]], 1, 65536, [1, 1], 1024, 1]


def test_occupancy_follows_threads_and_shared_memory(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        PTX
        + """
    function = ok(cu.cuModuleGetFunction(ok(cu.cuModuleLoadData(ptx("one"))), b"one"))
    blocks = lambda size, shared: int(ok(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, size, shared)))
    room = int(ok(cu.cuOccupancyAvailableDynamicSMemPerBlock(function, 2, 256)))
    answer([blocks(1024, 0), blocks(33, 0), blocks(32, 0), blocks(256, 80 << 10), blocks(1025, 0),
            blocks(256, room), blocks(256, room + 1)])
    """,
    )
    # 2,048 threads and 32 blocks of a multiprocessor, 164 KiB of shared memory of which each block takes 1 KiB itself.
    assert got == [2, 32, 32, 2, 0, 2, 1]


def test_the_linkers_result_holds_all_its_inputs(machine: sim.Machine, tmp_path: Path) -> None:
    got = sim_cuda.run(
        machine,
        PTX
        + f"""
    path = {str(tmp_path / "two.ptx")!r}
    open(path, "wb").write(ptx("two")[:-1])
    state, kind = ok(cu.cuLinkCreate(0, [], [])), cu.CUjitInputType.CU_JIT_INPUT_PTX
    empty = int(cu.cuLinkComplete(state)[0])
    text = ptx("one")
    ok(cu.cuLinkAddData(state, kind, text, len(text), b"one", 0, [], []))
    ok(cu.cuLinkAddFile(state, kind, path.encode(), 0, [], []))
    wrong = int(cu.cuLinkAddData(state, kind, b"nothing\\0", 8, b"x", 0, [], [])[0])
    absent = int(cu.cuLinkAddFile(state, kind, b"/no/such.ptx", 0, [], [])[0])
    image, _ = ok(cu.cuLinkComplete(state))
    module = ok(cu.cuModuleLoadData(image))
    for name in (b"one", b"two"):
        launch(ok(cu.cuModuleGetFunction(module, name)))
    ok(cu.cuCtxSynchronize()); ok(cu.cuLinkDestroy(state))
    answer([empty, wrong, absent])
    """,
    )
    assert got == [1, 218, 301]


def test_a_user_object_lives_as_long_as_the_last_graph_that_keeps_it(machine: sim.Machine) -> None:
    got = sim_cuda.run(
        machine,
        PTX
        + """
    ended = []
    destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda pointer: ended.append(pointer))
    cuda = ctypes.CDLL("libcuda.so.1")
    def call(name, *arguments):
        assert getattr(cuda, name)(*arguments) == 0, name
    word, graphs = ctypes.c_void_p(), [ctypes.c_void_p() for _ in range(2)]
    call("cuUserObjectCreate", ctypes.byref(word), ctypes.c_void_p(7), destroy, 1, 1)
    call("cuGraphCreate", ctypes.byref(graphs[0]), 0)
    call("cuGraphRetainUserObject", graphs[0], word, 1, 1)  # the caller's reference moves
    call("cuGraphClone", ctypes.byref(graphs[1]), graphs[0])
    call("cuGraphRetainUserObject", graphs[1], word, 2, 0)
    call("cuGraphReleaseUserObject", graphs[1], word, 1)
    seen = []
    for graph in graphs:
        call("cuGraphDestroy", graph)
        seen.append(list(ended))
    answer(seen)
    """,
    )
    assert got == [[], [7]]
