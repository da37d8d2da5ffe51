/* SPDX-License-Identifier: Apache-2.0 */
/* What the device can do at best: straight reads, reads through a block table, copies, multiply-adds. */
#include "bench/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    ROUNDS = 5, /* the best of which counts */
    GPU_GROUP = 256,
    GPU_GROUPS = 32,    /* work-groups a compute unit: enough loads in flight */
    GPU_LAUNCHES = 8,   /* back to back, so that a launch's own cost is not counted */
    CPU_ITEMS = 8,      /* work-items a core, for the driver to hand out evenly */
    FMA_ROUNDS = 20000, /* of the chains of a work-item */
    FMA_CPU_CHAINS = 12,
    FMA_GPU_CHAINS = 8
};

/* CPU kernels are one work-item a work-group with 64-byte vectors; reading in four streams and in one, the faster
 * counts. GPU kernels have four 16-byte loads in flight a work-item. */
static const char cpu_source[] =
    "#pragma OPENCL FP_CONTRACT OFF\n"
    "uint sum16(uint16 x)\n"
    "{\n"
    "    uint8 a = x.lo ^ x.hi;\n"
    "    uint4 b = a.lo ^ a.hi;\n"
    "    return b.x ^ b.y ^ b.z ^ b.w;\n"
    "}\n"
    "__kernel void read_cpu_1(__global const uint16 *x, __global uint *out, ulong count)\n"
    "{\n"
    "    __global const uint16 *p = x + get_global_id(0) * count;\n"
    "    uint16 a = 0, b = 0, c = 0, d = 0;\n"
    "    for (ulong i = 0; i < count; i += 4) {\n"
    "        a ^= p[i];\n"
    "        b ^= p[i + 1];\n"
    "        c ^= p[i + 2];\n"
    "        d ^= p[i + 3];\n"
    "    }\n"
    "    out[get_global_id(0)] = sum16(a ^ b ^ c ^ d);\n"
    "}\n"
    "__kernel void read_cpu_4(__global const uint16 *x, __global uint *out, ulong count)\n"
    "{\n"
    "    __global const uint16 *p = x + get_global_id(0) * count;\n"
    "    ulong n = count / 4;\n"
    "    uint16 a = 0, b = 0, c = 0, d = 0;\n"
    "    for (ulong i = 0; i < n; i++) {\n"
    "        a ^= p[i];\n"
    "        b ^= p[i + n];\n"
    "        c ^= p[i + 2 * n];\n"
    "        d ^= p[i + 3 * n];\n"
    "    }\n"
    "    out[get_global_id(0)] = sum16(a ^ b ^ c ^ d);\n"
    "}\n"
    "__kernel void copy_cpu(__global const uint16 *x, __global uint16 *out, ulong count)\n"
    "{\n"
    "    ulong first = get_global_id(0) * count;\n"
    "    for (ulong i = 0; i < count; i++)\n"
    "        out[first + i] = x[first + i];\n"
    "}\n"
    "__kernel void table_cpu(__global const uint4 *x, __global const int *table, __global uint *out, ulong entries,\n"
    "                        ulong vectors)\n"
    "{\n"
    "    ulong first = get_global_id(0) * entries / get_global_size(0);\n"
    "    ulong last = (get_global_id(0) + 1) * entries / get_global_size(0);\n"
    "    uint16 a = 0, b = 0;\n"
    "    for (ulong e = first; e < last; e++) {\n"
    "        __global const uint4 *p = x + (ulong)table[e] * 2 * vectors, *q = p + vectors;\n"
    "        for (ulong i = 0; i + 4 <= vectors; i += 4) {\n"
    "            a ^= (uint16)(p[i], p[i + 1], p[i + 2], p[i + 3]);\n"
    "            b ^= (uint16)(q[i], q[i + 1], q[i + 2], q[i + 3]);\n"
    "        }\n"
    "    }\n"
    "    out[get_global_id(0)] = sum16(a ^ b);\n"
    "}\n"
    "__kernel void fma_cpu(__global float *out, float x, float y)\n"
    "{\n"
    "    float16 a[12];\n"
    "    float16 m = (float16)(x), n = (float16)(y), sum = 0.0f;\n"
    "    for (int k = 0; k < 12; k++)\n"
    "        a[k] = (float16)(k + get_global_id(0));\n"
    "    for (int i = 0; i < ROUNDS; i++) {\n"
    "        a[0] = fma(a[0], m, n); a[1] = fma(a[1], m, n); a[2] = fma(a[2], m, n); a[3] = fma(a[3], m, n);\n"
    "        a[4] = fma(a[4], m, n); a[5] = fma(a[5], m, n); a[6] = fma(a[6], m, n); a[7] = fma(a[7], m, n);\n"
    "        a[8] = fma(a[8], m, n); a[9] = fma(a[9], m, n); a[10] = fma(a[10], m, n); a[11] = fma(a[11], m, n);\n"
    "    }\n"
    "    for (int k = 0; k < 12; k++)\n"
    "        sum += a[k];\n"
    "    out[get_global_id(0)] = sum.s0 + sum.s3 + sum.s7 + sum.sf;\n"
    "}\n";

static const char gpu_source[] =
    "__kernel void read_gpu(__global const uint4 *x, __global uint *out, ulong count)\n"
    "{\n"
    "    size_t step = get_global_size(0);\n"
    "    uint4 s = 0;\n"
    "    for (ulong i = get_global_id(0); i < count; i += step * 4) {\n"
    "        uint4 a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];\n"
    "        s ^= a ^ b ^ c ^ d;\n"
    "    }\n"
    "    if ((s.x ^ s.y ^ s.z ^ s.w) == 0x12345)\n"
    "        out[0] = s.x;\n"
    "}\n"
    "__kernel void copy_gpu(__global const uint4 *x, __global uint4 *out, ulong count)\n"
    "{\n"
    "    size_t step = get_global_size(0);\n"
    "    for (ulong i = get_global_id(0); i < count; i += step * 4) {\n"
    "        uint4 a = x[i], b = x[i + step], c = x[i + 2 * step], d = x[i + 3 * step];\n"
    "        out[i] = a;\n"
    "        out[i + step] = b;\n"
    "        out[i + 2 * step] = c;\n"
    "        out[i + 3 * step] = d;\n"
    "    }\n"
    "}\n"
    "__kernel void table_gpu(__global const uint4 *x, __global const int *table, __global uint *out, ulong entries,\n"
    "                        ulong vectors)\n"
    "{\n"
    "    size_t step = get_local_size(0);\n"
    "    uint4 s = 0;\n"
    "    for (ulong e = get_group_id(0); e < entries; e += get_num_groups(0)) {\n"
    "        __global const uint4 *p = x + (ulong)table[e] * 2 * vectors, *q = p + vectors;\n"
    "        ulong i = get_local_id(0);\n"
    "        for (; i + step < vectors; i += step * 2) {\n"
    "            uint4 a = p[i], b = p[i + step], c = q[i], d = q[i + step];\n"
    "            s ^= a ^ b ^ c ^ d;\n"
    "        }\n"
    "        for (; i < vectors; i += step)\n"
    "            s ^= p[i] ^ q[i];\n"
    "    }\n"
    "    if ((s.x ^ s.y ^ s.z ^ s.w) == 0x12345)\n"
    "        out[0] = s.x;\n"
    "}\n"
    "__kernel void fma_gpu(__global float *out, float x, float y)\n"
    "{\n"
    "    float4 m = (float4)(x), n = (float4)(y);\n"
    "    float4 a = (float4)(get_global_id(0)), b = a + 1, c = a + 2, d = a + 3, e = a + 4, f = a + 5, g = a + 6, h = "
    "a + 7;\n"
    "    for (int i = 0; i < ROUNDS; i++) {\n"
    "        a = fma(a, m, n); b = fma(b, m, n); c = fma(c, m, n); d = fma(d, m, n);\n"
    "        e = fma(e, m, n); f = fma(f, m, n); g = fma(g, m, n); h = fma(h, m, n);\n"
    "    }\n"
    "    a += b + c + d + e + f + g + h;\n"
    "    out[get_global_id(0)] = a.x + a.y + a.z + a.w;\n"
    "}\n";

static const char fill_source[] =
    "__kernel void fill(__global uchar *base, ulong count, int dtype, uint seed, ulong side, float even, float odd)\n"
    "{\n"
    "    for (ulong i = get_global_id(0); i < count; i += get_global_size(0)) {\n"
    "        uint x = (uint)i * 0x9e3779b9u ^ (uint)(i >> 32) ^ seed;\n"
    "        x = (x ^ (x >> 16)) * 0x7feb352du;\n"
    "        x = (x ^ (x >> 15)) * 0x846ca68bu;\n"
    "        x ^= x >> 16;\n"
    "        float value = ((float)(x >> 8) / 8388608.0f - 1.0f) * (i / side % 2 ? odd : even);\n"
    "        if (dtype == 2)\n"
    "            ((__global float *)base)[i] = value;\n"
    "        else if (dtype == 1)\n"
    "            ((__global ushort *)base)[i] = (ushort)(as_uint(value) >> 16);\n"
    "        else\n"
    "            vstore_half(value, i, (__global half *)base);\n"
    "    }\n"
    "}\n";

/* Since the first call: a double that counts from 1970 moves in steps of 0.24 us. */
double bench_seconds(void)
{
    static time_t first;
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    if (!first)
        first = now.tv_sec;
    return (double)(now.tv_sec - first) + 1e-9 * (double)now.tv_nsec;
}

int bench_kernels(bench_rig *rig)
{
    cl_context context = kvleaf_device_context(rig->device);
    cl_device_id device = kvleaf_device_id(rig->device);
    const char *texts[] = {cpu_source, gpu_source, fill_source};
    char options[64];
    cl_int error;
    snprintf(options, sizeof(options), "-DROUNDS=%d", FMA_ROUNDS);
    rig->kernels = clCreateProgramWithSource(context, 3, texts, NULL, &error);
    if (error == CL_SUCCESS)
        error = clBuildProgram(rig->kernels, 1, &device, options, NULL, NULL);
    if (error == CL_SUCCESS)
        return CLI_OK;
    char log[4096] = "";
    if (rig->kernels)
        clGetProgramBuildInfo(rig->kernels, device, CL_PROGRAM_BUILD_LOG, sizeof(log) - 1, log, NULL);
    fprintf(stderr, "kvleaf-bench: the measuring kernels do not build (%d)\n%s\n", error, log);
    return CLI_FAILED;
}

typedef struct launch {
    cl_kernel kernel;
    size_t global, local;
    int count; /* back to back */
} launch;

/* Seconds of one launch, the best of the rounds after one to warm up; 0 on failure. */
static double best_time(const bench_rig *rig, const launch *what)
{
    double best = 0;
    for (int round = -1; round < ROUNDS; round++) {
        double start = bench_seconds();
        for (int i = 0; i < what->count; i++) {
            if (clEnqueueNDRangeKernel(rig->queue, what->kernel, 1, NULL, &what->global, &what->local, 0, NULL, NULL) !=
                CL_SUCCESS)
                return 0;
        }
        if (clFinish(rig->queue) != CL_SUCCESS)
            return 0;
        double time = (bench_seconds() - start) / what->count;
        if (round >= 0 && (best == 0 || time < best))
            best = time;
    }
    return best;
}

typedef struct argument {
    size_t size;
    const void *value;
} argument;

static cl_kernel make_kernel(const bench_rig *rig, const char *name, const argument *arguments, int count)
{
    cl_int error;
    cl_kernel kernel = clCreateKernel(rig->kernels, name, &error);
    for (int i = 0; kernel && i < count; i++) {
        if (clSetKernelArg(kernel, (cl_uint)i, arguments[i].size, arguments[i].value) != CL_SUCCESS) {
            clReleaseKernel(kernel);
            kernel = NULL;
        }
    }
    return kernel;
}

static size_t group_size(const bench_rig *rig)
{
    return rig->caps.max_work_group_size < GPU_GROUP ? rig->caps.max_work_group_size : GPU_GROUP;
}

static launch shape_launch(const bench_rig *rig)
{
    launch out = {.global = rig->caps.compute_units * (size_t)CPU_ITEMS, .local = 1, .count = 1};
    if (rig->gpu) {
        out.local = group_size(rig);
        out.global = rig->caps.compute_units * (size_t)GPU_GROUPS * out.local;
        out.count = GPU_LAUNCHES;
    }
    return out;
}

static double timed(const bench_rig *rig, const char *name, const argument *arguments, int count)
{
    launch what = shape_launch(rig);
    what.kernel = make_kernel(rig, name, arguments, count);
    if (!what.kernel)
        return 0;
    double time = best_time(rig, &what);
    clReleaseKernel(what.kernel);
    return time;
}

/* Every second `side` elements get values of another size. */
static cl_int fill(const bench_rig *rig, cl_mem buffer, kvleaf_dtype dtype, uint64_t elements, uint32_t seed,
                   cl_ulong side, const float sizes[2])
{
    cl_ulong count = elements;
    cl_int type = (cl_int)dtype;
    const argument arguments[] = {{sizeof(buffer), &buffer}, {sizeof(count), &count}, {sizeof(type), &type},
                                  {sizeof(seed), &seed},     {sizeof(side), &side},   {sizeof(float), &sizes[0]},
                                  {sizeof(float), &sizes[1]}};
    launch what = shape_launch(rig);
    what.kernel = make_kernel(rig, "fill", arguments, 7);
    if (!what.kernel)
        return CL_INVALID_KERNEL;
    cl_int error = clEnqueueNDRangeKernel(rig->queue, what.kernel, 1, NULL, &what.global, &what.local, 0, NULL, NULL);
    if (error == CL_SUCCESS)
        error = clFinish(rig->queue);
    clReleaseKernel(what.kernel);
    return error;
}

cl_int bench_fill(const bench_rig *rig, cl_mem buffer, kvleaf_dtype dtype, uint64_t elements, uint32_t seed, float size)
{
    return fill(rig, buffer, dtype, elements, seed, elements ? elements : 1, (const float[]){size, size});
}

cl_int bench_fill_kv(const bench_rig *rig, cl_mem buffer, kvleaf_dtype dtype, uint64_t elements, uint32_t seed,
                     uint64_t side)
{
    return fill(rig, buffer, dtype, elements, seed, side, (const float[]){3.46f, 1.5f});
}

/* 1 GiB, less on a device that has little; a whole number of rounds of every work-item. */
static uint64_t straight_bytes(const bench_rig *rig, uint64_t unit)
{
    uint64_t bytes = (uint64_t)1 << 30;
    if (bytes > rig->caps.max_alloc_bytes)
        bytes = rig->caps.max_alloc_bytes;
    if (bytes > rig->caps.global_bytes / 8)
        bytes = rig->caps.global_bytes / 8;
    return bytes / unit * unit;
}

static void measure_read(const bench_rig *rig, cl_mem buffer, cl_mem out, uint64_t bytes, bench_ceilings *ceilings)
{
    launch shape = shape_launch(rig);
    cl_ulong count = rig->gpu ? bytes / 16 : bytes / 64 / shape.global;
    const argument arguments[] = {{sizeof(buffer), &buffer}, {sizeof(out), &out}, {sizeof(count), &count}};
    double time = timed(rig, rig->gpu ? "read_gpu" : "read_cpu_1", arguments, 3);
    if (!rig->gpu) {
        double other = timed(rig, "read_cpu_4", arguments, 3);
        time = other > 0 && other < time ? other : time;
    }
    ceilings->read_gb_per_s = time > 0 ? (double)bytes / time / 1e9 : 0;
}

/* Copies one half of the buffer over the other. */
static void measure_copy(const bench_rig *rig, cl_mem buffer, uint64_t bytes, bench_ceilings *ceilings)
{
    launch shape = shape_launch(rig);
    cl_ulong count = rig->gpu ? bytes / 32 : bytes / 128 / shape.global;
    cl_int error;
    cl_buffer_region halves[2] = {{0, bytes / 2}, {bytes / 2, bytes / 2}};
    cl_mem from = clCreateSubBuffer(buffer, 0, CL_BUFFER_CREATE_TYPE_REGION, &halves[0], &error);
    cl_mem to = clCreateSubBuffer(buffer, 0, CL_BUFFER_CREATE_TYPE_REGION, &halves[1], &error);
    const argument arguments[] = {{sizeof(from), &from}, {sizeof(to), &to}, {sizeof(count), &count}};
    double time = from && to ? timed(rig, rig->gpu ? "copy_gpu" : "copy_cpu", arguments, 3) : 0;
    ceilings->copy_gb_per_s = time > 0 ? (double)bytes / time / 1e9 : 0;
    if (from)
        clReleaseMemObject(from);
    if (to)
        clReleaseMemObject(to);
}

static void measure_table(const bench_rig *rig, const bench_blocks *blocks, cl_mem out, bench_ceilings *ceilings)
{
    cl_ulong entries = (cl_ulong)blocks->entries, vectors = (cl_ulong)blocks->block_bytes / 2 / 16;
    const argument arguments[] = {{sizeof(cl_mem), &blocks->memory},
                                  {sizeof(cl_mem), &blocks->table},
                                  {sizeof(out), &out},
                                  {sizeof(entries), &entries},
                                  {sizeof(vectors), &vectors}};
    double time = timed(rig, rig->gpu ? "table_gpu" : "table_cpu", arguments, 5);
    double bytes = (double)blocks->entries * (double)blocks->block_bytes;
    ceilings->table_read_gb_per_s = time > 0 ? bytes / time / 1e9 : 0;
}

static void measure_fma(const bench_rig *rig, cl_mem out, bench_ceilings *ceilings)
{
    launch shape = shape_launch(rig);
    float x = 0.999f, y = 0.5f;
    const argument arguments[] = {{sizeof(out), &out}, {sizeof(x), &x}, {sizeof(y), &y}};
    double time = timed(rig, rig->gpu ? "fma_gpu" : "fma_cpu", arguments, 3);
    double lanes = rig->gpu ? 4.0 * FMA_GPU_CHAINS : 16.0 * FMA_CPU_CHAINS;
    ceilings->fma_gflop_per_s = time > 0 ? 2 * lanes * FMA_ROUNDS * (double)shape.global / time / 1e9 : 0;
}

int bench_measure_ceilings(const bench_rig *rig, bench_kind kind, const bench_blocks *blocks, bench_ceilings *out)
{
    launch shape = shape_launch(rig);
    cl_context context = kvleaf_device_context(rig->device);
    uint64_t unit = rig->gpu ? 16 * 4 * 2 * shape.global : 64 * 4 * 2 * 64 * shape.global;
    uint64_t bytes = straight_bytes(rig, unit);
    cl_int error;
    memset(out, 0, sizeof(*out));
    cl_mem sums = clCreateBuffer(context, CL_MEM_READ_WRITE, shape.global * sizeof(float), NULL, &error);
    cl_mem buffer = NULL;
    if (kind != BENCH_PREFILL && error == CL_SUCCESS)
        buffer = clCreateBuffer(context, CL_MEM_READ_WRITE, bytes, NULL, &error);
    if (error == CL_SUCCESS && buffer)
        error = bench_fill(rig, buffer, KVLEAF_F32, bytes / 4, 1, 1);
    if (error == CL_SUCCESS && kind == BENCH_DECODE)
        measure_read(rig, buffer, sums, bytes, out);
    if (error == CL_SUCCESS && kind == BENCH_DECODE && blocks && blocks->block_bytes % 128 == 0)
        measure_table(rig, blocks, sums, out);
    if (error == CL_SUCCESS && kind == BENCH_APPEND)
        measure_copy(rig, buffer, bytes, out);
    if (error == CL_SUCCESS && kind == BENCH_PREFILL)
        measure_fma(rig, sums, out);
    if (buffer)
        clReleaseMemObject(buffer);
    if (sums)
        clReleaseMemObject(sums);
    if (error == CL_SUCCESS)
        return CLI_OK;
    fprintf(stderr, "kvleaf-bench: can't measure the device's limits (%d)\n", error);
    return CLI_FAILED;
}
