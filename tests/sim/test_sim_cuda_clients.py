"""Programs that know nothing of the simulation run on it: compiled C, cuda-core, numba-cuda."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import sim_cuda, simulated
from vcuda import sim


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> sim.Machine:
    return sim.Machine.create(tmp_path_factory.mktemp("sim") / "machine", [sim.SimCard()] * 2)


C_PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As a program sees <cuda.h>: the names that it maps to. */
typedef int CUresult;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef unsigned long long CUdeviceptr;
CUresult cuInit(unsigned), cuDeviceGetCount(int *), cuCtxCreate_v2(CUcontext *, unsigned, int), cuCtxDestroy_v2(CUcontext);
CUresult cuModuleLoadData(CUmodule *, const void *), cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t), cuMemFree_v2(CUdeviceptr), cuEventCreate(CUevent *, unsigned);
CUresult cuMemcpyHtoDAsync_v2_ptsz(CUdeviceptr, const void *, size_t, CUstream);
CUresult cuMemcpyDtoHAsync_v2_ptsz(void *, CUdeviceptr, size_t, CUstream), cuStreamSynchronize_ptsz(CUstream);
CUresult cuEventRecord_ptsz(CUevent, CUstream), cuEventElapsedTime(float *, CUevent, CUevent);
CUresult cuLaunchKernel_ptsz(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                             void **, void **);
CUresult cuGetErrorName(CUresult, const char **);

static void check(CUresult result, const char *what)
{
    const char *name = "?";
    if (result == 0)
        return;
    cuGetErrorName(result, &name);
    fprintf(stderr, "%s: %s\n", what, name);
    exit(1);
}
#define CHECK(call) check(call, #call)

int main(void)
{
    static const char ptx[] = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry spin_4ms(.param .u64 p)\n{ ret; }\n";
    char out[1000], in[1000] = "nothing is computed, all is kept";
    int count;
    CUcontext ctx;
    CUmodule module;
    CUfunction function;
    CUdeviceptr pointer;
    CUevent begin, end;
    float elapsed;
    void *params[] = {&pointer};
    CHECK(cuInit(0));
    CHECK(cuDeviceGetCount(&count));
    CHECK(cuCtxCreate_v2(&ctx, 0, count - 1));
    CHECK(cuModuleLoadData(&module, ptx));
    CHECK(cuModuleGetFunction(&function, module, "spin_4ms"));
    CHECK(cuMemAlloc_v2(&pointer, sizeof in));
    CHECK(cuEventCreate(&begin, 0));
    CHECK(cuEventCreate(&end, 0));
    CHECK(cuMemcpyHtoDAsync_v2_ptsz(pointer, in, sizeof in, 0));
    CHECK(cuEventRecord_ptsz(begin, 0));
    CHECK(cuLaunchKernel_ptsz(function, 2, 3, 4, 5, 6, 7, 0, 0, params, 0));
    CHECK(cuEventRecord_ptsz(end, 0));
    CHECK(cuMemcpyDtoHAsync_v2_ptsz(out, pointer, sizeof out, 0));
    CHECK(cuStreamSynchronize_ptsz(0));
    CHECK(cuEventElapsedTime(&elapsed, begin, end));
    CHECK(cuMemFree_v2(pointer));
    CHECK(cuCtxDestroy_v2(ctx));
    printf("%d %s %.3f\n", count, memcmp(in, out, sizeof in) ? "different" : "equal", elapsed);
    return 0;
}
"""


def test_a_compiled_program_links_and_runs(tmp_path: Path) -> None:
    machine = sim.Machine.create(tmp_path / "machine", [sim.SimCard()] * 2)
    source, program = tmp_path / "client.c", tmp_path / "client"
    source.write_text(C_PROGRAM)
    library = machine.library_folder / "libcuda.so.1"
    subprocess.run(["gcc", "-Wall", "-Werror", source, "-o", program, library], check=True, timeout=60)
    result = simulated.program(machine, str(program))
    count, data, elapsed = result.stdout.split()
    assert (count, data) == ("2", "equal") and float(elapsed) >= 4, result.stderr
    assert machine.report().cards[1].busy_ns == 4_000_000


def test_cuda_core(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        from cuda.core import Device, LaunchConfig, ObjectCode, launch
        device = Device(1); device.set_current(); stream = device.create_stream()
        ptx = b".version 8.0\\n.target sm_80\\n.address_size 64\\n.visible .entry spin_3ms(.param .u64 p, .param .u32 n) { ret; }\\n"
        kernel = ObjectCode.from_ptx(ptx + b"\\0").get_kernel("spin_3ms")
        buffer = device.allocate(1 << 20, stream=stream)
        begin, end = (device.create_event(options={"timing_enabled": True}) for _ in range(2))
        stream.record(begin); launch(stream, LaunchConfig(grid=4, block=32), kernel, buffer, ctypes.c_uint32(5))
        stream.record(end); end.sync(); buffer.close(stream); stream.sync()
        sizes = [(one.offset, one.size) for one in kernel.arguments_info]
        answer([device.name, str(device.compute_capability), kernel.num_arguments, sizes, end - begin >= 3])
        """,
    )[2:] == [2, [[0, 8], [8, 4]], True]


def test_numba_cuda_arrays_streams_and_events(machine: sim.Machine) -> None:
    assert sim_cuda.run(
        machine,
        """
        import numpy
        from numba import cuda
        assert cuda.is_available()
        data = numpy.arange(1000, dtype=numpy.float32); stream = cuda.stream()
        there = cuda.to_device(data, stream=stream); part = there[100:200].copy_to_host(stream=stream)
        pinned = cuda.pinned_array(10, dtype=numpy.int32); pinned[:] = 3
        managed = cuda.managed_array(10, dtype=numpy.int32); managed[:] = 4
        event = cuda.event(); event.record(stream); event.synchronize(); stream.synchronize()
        free, total = cuda.current_context().get_memory_info()
        names = [gpu.compute_capability for gpu in cuda.gpus]
        answer([bool((part == data[100:200]).all()), int(managed.sum()), free < total, len(names)])
        """,
    ) == [True, 40, True, 2]
