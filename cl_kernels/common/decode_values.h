/* SPDX-License-Identifier: Apache-2.0 */
/* What kvl_decode takes by value, in one struct, since a driver's enqueue takes its time for every argument. Read by C
 * and by OpenCL C. Views are in elements. */
#ifndef KVLEAF_DECODE_VALUES_H
#define KVLEAF_DECODE_VALUES_H

#ifdef __OPENCL_C_VERSION__
#define DEVICE_TYPE(name) name
#else
#define DEVICE_TYPE(name) cl_##name
#endif

typedef struct decode_values {
    DEVICE_TYPE(long4) q_view, out_view;               /* {offset, token stride, head stride, 0} */
    DEVICE_TYPE(long4) lse_view;                       /* the same; the last: whether to write */
    DEVICE_TYPE(long4) k_view, v_view;                 /* {offset, block stride, token stride, head stride} */
    DEVICE_TYPE(long4) k_source_view, v_source_view;   /* of new keys and values: {offset, token, head stride, dtype} */
    DEVICE_TYPE(long2) slots;                          /* where they lie in meta, negative where nothing is to be
                                                          appended; that of the first row */
    DEVICE_TYPE(long2) workspace;                      /* behind meta, in ints from its start: counters of rows, of a
                                                          kernel that folds, and partials */
    DEVICE_TYPE(int4) shape;                           /* {num_heads, num_kv_heads, head_dim, block_size} */
    DEVICE_TYPE(int4) work;                            /* {rows at, splits or runs at, their number, blocks} */
    DEVICE_TYPE(int4) first_row;                       /* {q token, visible keys, table, first key} */
    DEVICE_TYPE(int2) runs;                            /* {splits a run of the first row, rows} */
    DEVICE_TYPE(float) scale_log2;                     /* softmax_scale * log2 e */
    DEVICE_TYPE(int) none;                             /* or the end is padding, which rusticl does not count */
} decode_values;

#ifdef __OPENCL_C_VERSION__
/* A buffer that is there twice comes once: v is NULL where it is k, k source and v source where they are q. */
#define FIND_BUFFERS(q, k, v, k_source, v_source)                                                                      \
    v = v ? v : k;                                                                                                     \
    k_source = k_source ? k_source : (__global const uchar *)(q);                                                      \
    v_source = v_source ? v_source : (__global const uchar *)(q)
/* So too out, of kernels that fold: NULL where it lies in q's buffer. */
#define FIND_OUT(q, out) out = out ? out : (__global OUT_ELEM *)(q)
#endif
#endif
