#line 1 "tools/generate/model.cl"
/* SPDX-License-Identifier: Apache-2.0 */
/* What a Llama-style model needs between its matrix products and its attention, all in float32.
 *
 * OpenCL C 1.2, no extension. A row's result depends on that row alone: reductions have one fixed
 * order, whatever the number of rows. GROUP work-items share a row where a sum is taken: 1 on CPUs,
 * where a barrier costs more than it brings, 64 elsewhere. */

#ifndef GROUP
#define GROUP 1
#endif

/* Elements of a transposing tile's side: 16 floats are one cache line. */
#define TILE 16

#define DTYPE_F32  0
#define DTYPE_F16  1
#define DTYPE_BF16 2

float stored_element(__global const void *source, ulong at, int dtype)
{
    if (dtype == DTYPE_F16)
        return vload_half(at, (__global const half *)source);
    if (dtype == DTYPE_BF16)
        return as_float((uint)((__global const ushort *)source)[at] << 16);
    return ((__global const float *)source)[at];
}

/* target[column][first_row + row] = source[row][column]: a weight as the file has it, [rows, columns]
 * of any dtype, to the input-major float32 matrix the products read. One work-item a tile. */
__kernel void load_weight(__global const void *source, int rows, int columns, int dtype, __global float *target,
                          int target_rows, int first_row)
{
    int row0 = get_global_id(0) * TILE;
    int column0 = get_global_id(1) * TILE;
    int row_end = min(row0 + TILE, rows);
    int column_end = min(column0 + TILE, columns);

    for (int column = column0; column < column_end; column++)
        for (int row = row0; row < row_end; row++)
            target[(ulong)column * target_rows + first_row + row] =
                stored_element(source, (ulong)row * columns + column, dtype);
}

/* out[row][d] = table[d][token[row]]: the embedding shares the input-major matrix of a tied head. */
__kernel void embed(__global const int *tokens, __global const float *table, int hidden, int vocab,
                    __global float *out)
{
    int d = get_global_id(0);
    int row = get_global_id(1);

    out[(ulong)row * hidden + d] = table[(ulong)d * vocab + tokens[row]];
}

float sum_of_squares(__global const float *x, int n, int lane)
{
    float8 partial = (float8)(0.0f);
    float rest = 0.0f;
    int whole = n / 8;

    for (int i = lane; i < whole; i += GROUP) {
        float8 v = vload8(i, x);
        partial += v * v;
    }
    for (int i = whole * 8 + lane; i < n; i += GROUP)
        rest += x[i] * x[i];
    float4 half4 = partial.lo + partial.hi;
    float2 half2 = half4.lo + half4.hi;
    return half2.x + half2.y + rest;
}

/* out[row] = in[source row] / rms * weight; source row = picked[row] if use_picked, else row.
 * One work-group of GROUP a row. */
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void rms_norm(__global const float *in, __global const float *weight, int n, float epsilon,
              __global const int *picked, int use_picked, __global float *out)
{
    int row = get_group_id(0);
    int lane = get_local_id(0);
    __global const float *x = in + (ulong)(use_picked ? picked[row] : row) * n;
    __global float *y = out + (ulong)row * n;
    float sum = sum_of_squares(x, n, lane);

#if GROUP > 1
    __local float partial[GROUP];
    partial[lane] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int step = GROUP / 2; step > 0; step /= 2) {
        if (lane < step)
            partial[lane] += partial[lane + step];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    sum = partial[0];
#endif

    float scale = 1.0f / sqrt(sum / n + epsilon);
    int whole = n / 8;
    for (int i = lane; i < whole; i += GROUP)
        vstore8(vload8(i, x) * scale * vload8(i, weight), i, y);
    for (int i = whole * 8 + lane; i < n; i += GROUP)
        y[i] = x[i] * scale * weight[i];
}

/* Rotates the first `heads` heads of each row in place, half-split: dimension i with i + head_dim/2.
 * x has row_stride elements a row; table[position][head_dim] holds the cosines, then the sines.
 * One work-item a head. */
__kernel void rope(__global float *x, __global const int *positions, __global const float *table, int row_stride,
                   int head_dim)
{
    int head = get_global_id(0);
    int row = get_global_id(1);
    int half_dim = head_dim / 2;
    __global float *low = x + (ulong)row * row_stride + head * head_dim;
    __global float *high = low + half_dim;
    __global const float *cosines = table + (ulong)positions[row] * head_dim;
    __global const float *sines = cosines + half_dim;

    for (int i = 0; i < half_dim; i++) {
        float a = low[i], b = high[i];
        low[i] = a * cosines[i] - b * sines[i];
        high[i] = b * cosines[i] + a * sines[i];
    }
}

/* out[row][i] = silu(gate) * up, where a row of gate_up holds n gates, then n ups. */
__kernel void silu_mul(__global const float *gate_up, int n, __global float *out)
{
    int i = get_global_id(0);
    int row = get_global_id(1);
    float gate = gate_up[(ulong)row * 2 * n + i];
    float up = gate_up[(ulong)row * 2 * n + n + i];

    out[(ulong)row * n + i] = gate / (1.0f + exp(-gate)) * up;
}

#define NOT_FINITE(x) (!(fabs(x) <= FLT_MAX))

/* The lowest place of x[n] that holds `wanted`, or whose value is not finite; n where there is none. */
int lowest_place(__global const float *x, int n, float wanted, int not_finite, int lane)
{
    int lowest = n;

    for (int i = lane; i < n; i += GROUP)
        if (not_finite ? NOT_FINITE(x[i]) : x[i] == wanted)
            lowest = min(lowest, i);
    return lowest;
}

/* found[row] = the token of the largest logit, the lowest where several have it; the lowest token whose logit is not
 * finite, or -1, and that logit's bits. One work-group of GROUP a row. */
__kernel __attribute__((reqd_work_group_size(GROUP, 1, 1)))
void best_token(__global const float *logits, int vocab, __global int *found)
{
    int row = get_group_id(0);
    int lane = get_local_id(0);
    __global const float *x = logits + (ulong)row * vocab;
    int whole = vocab / 8;
    float8 largest = (float8)(-INFINITY);
    int8 odd = (int8)(0);

    for (int i = lane; i < whole; i += GROUP) {
        float8 v = vload8(i, x);
        largest = fmax(largest, v);
        odd |= NOT_FINITE(v);
    }
    for (int i = whole * 8 + lane; i < vocab; i += GROUP) {
        largest.s0 = fmax(largest.s0, x[i]);
        odd.s0 |= NOT_FINITE(x[i]);
    }
    float4 four = fmax(largest.lo, largest.hi);
    float best = fmax(fmax(four.s0, four.s1), fmax(four.s2, four.s3));
    int broken = any(odd != 0);

#if GROUP > 1
    __local float bests[GROUP];
    __local int places[GROUP];
    bests[lane] = best;
    places[lane] = broken;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int i = 0; i < GROUP; i++) {
        best = fmax(best, bests[i]);
        broken |= places[i];
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    places[lane] = lowest_place(x, vocab, best, broken, lane);
    barrier(CLK_LOCAL_MEM_FENCE);
    int place = vocab;
    for (int i = 0; i < GROUP; i++)
        place = min(place, places[i]);
#else
    int place = lowest_place(x, vocab, best, broken, lane);
#endif

    if (lane == 0) {
        found[3 * row] = broken ? 0 : place;
        found[3 * row + 1] = broken ? place : -1;
        found[3 * row + 2] = broken ? as_int(x[place]) : 0;
    }
}
