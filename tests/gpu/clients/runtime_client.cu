// A program of the CUDA runtime, built by nvcc with the static or the shared cudart: fills its share by three allocators,
// recovers from the error, computes with a kernel and a graph. Prints one line of JSON.
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <cuda_runtime.h>

static const size_t MIB = 1 << 20;

static void check(cudaError_t result, const char *what)
{
    if (result == cudaSuccess)
        return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(result));
    exit(1);
}

__global__ void mixed(unsigned *values, unsigned count)
{
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        values[at] = values[at] * 1664525u + 1013904223u;
}

typedef cudaError_t (*allocate_function)(void **, size_t);

static cudaError_t plain(void **pointer, size_t bytes) { return cudaMalloc(pointer, bytes); }
static cudaError_t managed(void **pointer, size_t bytes) { return cudaMallocManaged(pointer, bytes); }
static cudaError_t ordered(void **pointer, size_t bytes) { return cudaMallocAsync(pointer, bytes, (cudaStream_t)0); }

// MiB that could be had; `error` is what the end was. All of it is given back.
static size_t fill(allocate_function allocate, bool is_ordered, int *error)
{
    std::vector<void *> held;
    void *pointer;
    cudaError_t result;
    while ((result = allocate(&pointer, 64 * MIB)) == cudaSuccess)
        held.push_back(pointer);
    *error = (int)result;
    cudaGetLastError();
    for (void *each : held)
        check(is_ordered ? cudaFreeAsync(each, (cudaStream_t)0) : cudaFree(each), "free");
    check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return 64 * held.size();
}

int main()
{
    size_t free_bytes, total_bytes;
    int errors[3];
    check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
    size_t by_plain = fill(plain, false, &errors[0]), by_managed = fill(managed, false, &errors[1]);
    size_t by_pool = fill(ordered, true, &errors[2]);

    const unsigned count = 1 << 20;
    std::vector<unsigned> host(count);
    for (unsigned i = 0; i < count; i++)
        host[i] = i;
    unsigned *values;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    check(cudaMalloc((void **)&values, count * sizeof *values), "cudaMalloc");
    check(cudaMemcpy(values, host.data(), count * sizeof *values, cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    for (int i = 0; i < 20; i++)
        mixed<<<count / 256, 256, 0, stream>>>(values, count);
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiateWithFlags(&executable, graph, 0), "cudaGraphInstantiate");
    for (int i = 0; i < 10; i++)
        check(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check(cudaMemcpy(host.data(), values, count * sizeof *values, cudaMemcpyDeviceToHost), "cudaMemcpy");
    unsigned long long sum = 0, wanted = 0;
    for (unsigned i = 0; i < count; i++) {
        unsigned value = i;
        for (int turn = 0; turn < 200; turn++)
            value = value * 1664525u + 1013904223u;
        wanted += value;
        sum += host[i];
    }
    printf("{\"total_mib\": %zu, \"plain_mib\": %zu, \"managed_mib\": %zu, \"pool_mib\": %zu, \"errors\": [%d, %d, %d], \"right\": %s}\n",
           total_bytes / MIB, by_plain, by_managed, by_pool, errors[0], errors[1], errors[2], sum == wanted ? "true" : "false");
    return 0;
}
