/* SPDX-License-Identifier: Apache-2.0 */
#define CL_USE_DEPRECATED_OPENCL_1_2_APIS
#include "rig.h"

#include <stdlib.h>
#include <string.h>

enum { GUARD_ROWS = 3, CANARY = 0x5a };

rig_params rig_defaults(void)
{
    return (rig_params){
        .q_dtype = KVLEAF_F32,
        .kv_dtype = KVLEAF_F32,
        .out_dtype = KVLEAF_F32,
        .num_layers = 2,
        .num_heads = 4,
        .num_kv_heads = 2,
        .head_dim = 16,
        .block_size = 4,
        .num_blocks = 64,
        .max_sequences = 16,
        .max_entries = 16,
        .max_tokens = 256,
        .steps_in_flight = 4,
    };
}

int32_t rig_dim(const rig *r, int32_t layer)
{
    return r->p.layer_dim[layer] ? r->p.layer_dim[layer] : r->p.head_dim;
}

static int32_t largest_dim(const rig *r)
{
    int32_t largest = 0;
    for (int32_t i = 0; i < r->p.num_layers; i++)
        largest = rig_dim(r, i) > largest ? rig_dim(r, i) : largest;
    return largest;
}

/* Groups as the cache forms them, and a pool for each. */
static void make_pools(rig *r)
{
    int32_t owners[RIG_LAYERS] = {0}, dims[RIG_LAYERS] = {0}, windows[RIG_LAYERS] = {0};
    for (int32_t i = 0; i < r->p.num_layers; i++) {
        int32_t group = 0;
        while (group < r->num_groups && (dims[group] != rig_dim(r, i) || windows[group] != r->p.window[i]))
            group++;
        dims[group] = rig_dim(r, i);
        windows[group] = r->p.window[i];
        r->num_groups = group < r->num_groups ? r->num_groups : group + 1;
        r->group[i] = group;
        r->source[i] = r->p.kv_layer[i] ? r->source[r->p.kv_layer[i] - 1] : i;
        r->pool_layer[i] = r->source[i] == i ? owners[group]++ : r->pool_layer[r->source[i]];
    }
    for (int32_t i = 0; i < r->num_groups; i++) {
        int32_t blocks = windows[i] && r->p.window_blocks ? r->p.window_blocks : r->p.num_blocks;
        ASSERT_OK(
            kvleaf_pool_create(r->device,
                               kvleaf_pool_params(.num_layers = owners[i], .num_blocks = blocks,
                                                  .block_size = r->p.block_size, .num_kv_heads = r->p.num_kv_heads,
                                                  .head_dim_k = dims[i], .dtype = r->p.kv_dtype, .layout = r->p.layout),
                               &r->pools[i]));
    }
}

kvleaf_status rig_make_cache(rig *r)
{
    kvleaf_layer layers[RIG_LAYERS] = {{0}};
    for (int32_t i = 0; i < r->p.num_layers; i++)
        layers[i] = (kvleaf_layer){.num_heads = r->p.num_heads,
                                   .num_kv_heads = r->p.num_kv_heads,
                                   .head_dim_k = rig_dim(r, i),
                                   .window = r->p.window[i],
                                   .softcap = r->p.softcap[i],
                                   .kv_layer = r->p.kv_layer[i]};
    return kvleaf_cache_create(r->device,
                               kvleaf_cache_params(.layers = layers, .num_layers = r->p.num_layers, .pools = r->pools,
                                                   .num_pools = r->num_groups, .q_dtype = r->p.q_dtype,
                                                   .out_dtype = r->p.out_dtype, .max_sequences = r->p.max_sequences,
                                                   .max_context = r->p.max_context, .swap_blocks = r->p.swap_blocks,
                                                   .free_order = r->p.free_order,
                                                   .free_count = r->p.free_order ? r->p.num_blocks : 0),
                               &r->cache);
}

kvleaf_status rig_make_plan(rig *r, kvleaf_plan **plan)
{
    return kvleaf_plan_create(r->cache,
                              kvleaf_plan_params(.max_entries = r->p.max_entries, .max_tokens = r->p.max_tokens,
                                                 .max_decode_keys = r->p.max_decode_keys,
                                                 .steps_in_flight = r->p.steps_in_flight),
                              plan);
}

static cl_mem memory_of(const rig *r, int32_t layer, size_t *size)
{
    cl_mem memory;
    ASSERT_OK(kvleaf_pool_memory(r->pools[r->group[layer]], r->pool_layer[layer], &memory));
    assert_int_equal(clGetMemObjectInfo(memory, CL_MEM_SIZE, sizeof *size, size, NULL), CL_SUCCESS);
    return memory;
}

static void poison_pools(const rig *r)
{
    const uint8_t nan = 0xff; /* in every dtype */
    for (int32_t i = 0; i < r->p.num_layers; i++) {
        size_t size;
        cl_mem memory = memory_of(r, i, &size);
        assert_int_equal(clEnqueueFillBuffer(r->queue, memory, &nan, 1, 0, size, 0, NULL, NULL), 0);
    }
    assert_int_equal(clFinish(r->queue), CL_SUCCESS);
}

/* Bytes of a step's rows of some heads, guards included. */
static size_t rows_bytes(const rig *r, int32_t heads, int32_t dim, kvleaf_dtype dtype)
{
    return (size_t)(r->p.max_tokens + 2 * GUARD_ROWS) * (size_t)(heads * dim) * kvleaf_dtype_size(dtype);
}

static int open_rigs;

/* Of two at once each has its own context, so that one is foreign to the other. */
static void open_device(rig *r)
{
    kvleaf_device_params device = support_params();
    device.opencl = r->p.opencl;
    device.allocator = r->p.allocator;
    bool own = r->p.own_device || device.opencl || device.allocator.allocate;
    if (open_rigs++ || own)
        ASSERT_OK(open_rigs > 1 ? kvleaf_device_open(&device, &r->device) : support_create(&device, &r->device));
    else
        r->device = support_shared();
}

cl_command_queue rig_queue(const rig *r, cl_command_queue_properties properties)
{
    cl_int error = 0;
    cl_command_queue queue =
        clCreateCommandQueue(kvleaf_device_context(r->device), kvleaf_device_id(r->device), properties, &error);
    assert_int_equal(error, CL_SUCCESS);
    return queue;
}

void rig_open(rig *r, const rig_params *params)
{
    memset(r, 0, sizeof *r);
    r->p = *params;
    open_device(r);
    r->queue = rig_queue(r, r->p.queue_properties);
    make_pools(r);
    poison_pools(r);
    ASSERT_OK(rig_make_cache(r));
    if (!r->p.no_plan)
        ASSERT_OK(rig_make_plan(r, &r->plan));
    r->q = support_buffer(r->device, r->queue, rows_bytes(r, r->p.num_heads, largest_dim(r), r->p.q_dtype), 0xff);
    r->k = support_buffer(r->device, r->queue, rows_bytes(r, r->p.num_kv_heads, largest_dim(r), r->p.q_dtype), 0xff);
    r->v = support_buffer(r->device, r->queue, rows_bytes(r, r->p.num_kv_heads, largest_dim(r), r->p.q_dtype), 0xff);
    r->out = support_buffer(r->device, r->queue, rows_bytes(r, r->p.num_heads, largest_dim(r), r->p.out_dtype), CANARY);
    r->lse = support_buffer(r->device, r->queue, rows_bytes(r, r->p.num_heads, 1, KVLEAF_F32), CANARY);
    size_t rows = (size_t)r->p.num_layers * (size_t)r->p.max_tokens;
    r->out_bits = calloc(rows * (size_t)(r->p.num_heads * largest_dim(r)), kvleaf_dtype_size(r->p.out_dtype));
    r->lse_values = calloc(rows * (size_t)r->p.num_heads, sizeof(float));
    r->next_token = 1;
}

void rig_close(rig *r)
{
    cl_mem buffers[] = {r->q, r->k, r->v, r->out, r->lse};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        if (buffers[i])
            clReleaseMemObject(buffers[i]);
    kvleaf_plan_destroy(&r->plan);
    kvleaf_cache_destroy(&r->cache);
    for (int32_t i = 0; i < r->num_groups; i++)
        kvleaf_pool_destroy(&r->pools[i]);
    if (r->queue)
        clReleaseCommandQueue(r->queue);
    if (r->device != support_shared())
        kvleaf_device_destroy(&r->device);
    open_rigs--;
    free(r->out_bits);
    free(r->lse_values);
    for (int32_t i = 0; i < RIG_SEQS; i++)
        free(r->seqs[i]);
}

/* Room for one more; a copy of `from` where that is given. */
static rig_seq *add_seq(rig *r, const rig_seq *from)
{
    int32_t at = 0;
    while (at < RIG_SEQS - 1 && r->seqs[at])
        at++;
    assert_null(r->seqs[at]);
    r->seqs[at] = calloc(1, sizeof *r->seqs[at]);
    assert_non_null(r->seqs[at]);
    if (from)
        *r->seqs[at] = *from;
    return r->seqs[at];
}

rig_seq *rig_seq_with(rig *r, const kvleaf_seq_params *params)
{
    rig_seq *seq = add_seq(r, NULL);
    ASSERT_OK(kvleaf_seq_create(r->cache, params, &seq->seq));
    return seq;
}

rig_seq *rig_seq_new(rig *r)
{
    return rig_seq_with(r, NULL);
}

rig_seq *rig_seq_fork(rig *r, rig_seq *parent, int32_t pos)
{
    rig_seq *child = add_seq(r, parent);
    ASSERT_OK(kvleaf_seq_fork(r->cache, parent->seq, pos, &child->seq));
    child->committed = child->extended = pos;
    return child;
}

void rig_seq_end(rig *r, rig_seq *seq)
{
    ASSERT_OK(kvleaf_seq_destroy(r->cache, &seq->seq));
    for (int32_t i = 0; i < RIG_SEQS; i++)
        if (r->seqs[i] == seq)
            r->seqs[i] = NULL;
    free(seq);
}

static void cut(rig_seq *seq, int32_t length)
{
    seq->extended = length;
    seq->committed = seq->committed < length ? seq->committed : length;
}

void rig_truncate(rig *r, rig_seq *seq, int32_t length)
{
    ASSERT_OK(kvleaf_seq_truncate(r->cache, seq->seq, length));
    cut(seq, length);
}

static kvleaf_status extend(rig *r, rig_seq *seq, const int32_t *tokens, int32_t count)
{
    kvleaf_tokens add = {.struct_size = sizeof add, .ids = tokens, .count = count};
    assert_true(seq->extended + count <= RIG_LENGTH);
    int64_t cached = 0;
    kvleaf_status status = kvleaf_seq_extend(r->cache, seq->seq, &add, &cached);
    seq->committed += (int32_t)cached;
    for (int32_t i = 0; !status && i < count; i++)
        seq->tokens[seq->extended++] = tokens ? tokens[i] : r->next_token++;
    return status;
}

kvleaf_status rig_try_extend(rig *r, rig_seq *seq, int32_t count)
{
    return extend(r, seq, NULL, count);
}

void rig_extend(rig *r, rig_seq *seq, int32_t count)
{
    ASSERT_OK(extend(r, seq, NULL, count));
}

void rig_extend_with(rig *r, rig_seq *seq, const int32_t *tokens, int32_t count)
{
    ASSERT_OK(extend(r, seq, tokens, count));
}

/* In -1 .. 1, from its place. */
static float noise(char what, int32_t layer, int32_t token, int32_t head, int32_t dim)
{
    support_rng rng = {((uint64_t)(unsigned char)what << 56) ^ ((uint64_t)layer << 48) ^ ((uint64_t)token << 20) ^
                       ((uint64_t)head << 10) ^ (uint64_t)dim};
    support_next(&rng);
    return support_float(&rng);
}

static float rounded(kvleaf_dtype dtype, float value)
{
    uint32_t room = 0;
    reference_store(dtype, &room, 0, value);
    return reference_load(dtype, &room, 0);
}

/* What is given to the library, rounded to q's dtype. Scaled scores have a standard deviation of about 4. */
static float given(const rig *r, char what, int32_t layer, int32_t token, int32_t head, int32_t dim)
{
    float value = noise(what, layer, token, head, dim);
    return rounded(r->p.q_dtype, what == 'q' ? 12.0f * value : what == 'v' ? value + 0.5f : value);
}

/* And what the cache makes of it. */
static float stored(const rig *r, char what, int32_t pool_layer, int32_t token, int32_t head, int32_t dim)
{
    return rounded(r->p.kv_dtype, given(r, what, pool_layer, token, head, dim));
}

static cl_command_queue queue_of(const rig *r, const rig_step *step)
{
    return step->queue ? step->queue : r->queue;
}

static kvleaf_plan *plan_of(const rig *r, const rig_step *step)
{
    return step->plan ? step->plan : r->plan;
}

kvleaf_exec rig_exec(const rig *r, const rig_step *step)
{
    return (kvleaf_exec){.struct_size = sizeof(kvleaf_exec), .queue = queue_of(r, step)};
}

kvleaf_status rig_build(rig *r, const rig_step *step)
{
    kvleaf_batch_entry batch[16] = {{0}};
    for (int32_t i = 0; i < step->n; i++)
        batch[i] = (kvleaf_batch_entry){
            .seq = step->seqs[i]->seq, .num_q = step->num_q[i], .family = step->family, .mask = step->mask};
    kvleaf_exec exec = rig_exec(r, step);
    return kvleaf_plan_build(plan_of(r, step), r->cache, batch, step->n, &exec);
}

static void load_rows(rig *r, const rig_step *step, cl_mem buffer, char what, int32_t layer, int32_t heads)
{
    int32_t dim = rig_dim(r, layer);
    size_t row = (size_t)(heads * dim), at = GUARD_ROWS * row, size = rows_bytes(r, heads, dim, r->p.q_dtype);
    uint8_t *host = malloc(size);
    memset(host, 0xff, size);
    for (int32_t i = 0; i < step->n; i++)
        for (int32_t t = 0; t < step->num_q[i]; t++)
            for (int32_t h = 0; h < heads; h++)
                for (int32_t d = 0; d < dim; d++)
                    reference_store(r->p.q_dtype, host, at++,
                                    given(r, what, layer, step->seqs[i]->tokens[step->seqs[i]->committed + t], h, d));
    assert_int_equal(clEnqueueWriteBuffer(queue_of(r, step), buffer, CL_TRUE, 0, size, host, 0, NULL, NULL), 0);
    free(host);
}

static void fill_canary(cl_command_queue queue, cl_mem buffer, size_t size)
{
    const uint8_t canary = CANARY;
    assert_int_equal(clEnqueueFillBuffer(queue, buffer, &canary, 1, 0, size, 0, NULL, NULL), 0);
}

void rig_load(rig *r, const rig_step *step, int32_t layer)
{
    cl_command_queue queue = queue_of(r, step);
    assert_int_equal(clFinish(queue), CL_SUCCESS);
    load_rows(r, step, r->q, 'q', layer, r->p.num_heads);
    load_rows(r, step, r->k, 'k', r->source[layer], r->p.num_kv_heads);
    load_rows(r, step, r->v, 'v', r->source[layer], r->p.num_kv_heads);
    fill_canary(queue, r->out, rows_bytes(r, r->p.num_heads, rig_dim(r, layer), r->p.out_dtype));
    fill_canary(queue, r->lse, rows_bytes(r, r->p.num_heads, 1, KVLEAF_F32));
    assert_int_equal(clFinish(queue), CL_SUCCESS);
}

static kvleaf_tensor tensor(cl_mem buffer, kvleaf_dtype dtype, int32_t heads, int32_t dim)
{
    return (kvleaf_tensor){
        .handle = buffer, .dtype = dtype, .offset = (uint64_t)(GUARD_ROWS * heads * dim) * kvleaf_dtype_size(dtype)};
}

/* A layer's rows as its calls take them. */
typedef struct layer_tensors {
    kvleaf_tensor k, v, q, out, lse;
} layer_tensors;

static layer_tensors tensors_of(const rig *r, int32_t layer)
{
    int32_t dim = rig_dim(r, layer);
    return (layer_tensors){.k = tensor(r->k, r->p.q_dtype, r->p.num_kv_heads, dim),
                           .v = tensor(r->v, r->p.q_dtype, r->p.num_kv_heads, dim),
                           .q = tensor(r->q, r->p.q_dtype, r->p.num_heads, dim),
                           .out = tensor(r->out, r->p.out_dtype, r->p.num_heads, dim),
                           .lse = tensor(r->lse, KVLEAF_F32, r->p.num_heads, 1)};
}

kvleaf_status rig_append_on(rig *r, const rig_step *step, int32_t layer, const kvleaf_exec *exec)
{
    layer_tensors t = tensors_of(r, layer);
    return kvleaf_append(plan_of(r, step), layer, &t.k, &t.v, exec);
}

kvleaf_status rig_append(rig *r, const rig_step *step, int32_t layer)
{
    kvleaf_exec exec = rig_exec(r, step);
    return rig_append_on(r, step, layer, &exec);
}

kvleaf_status rig_attend(rig *r, const rig_step *step, int32_t layer)
{
    layer_tensors t = tensors_of(r, layer);
    kvleaf_exec exec = rig_exec(r, step);
    return kvleaf_attend(plan_of(r, step), layer, &t.q, &t.out, &t.lse, &exec);
}

kvleaf_status rig_append_attend(rig *r, const rig_step *step, int32_t layer)
{
    layer_tensors t = tensors_of(r, layer);
    kvleaf_exec exec = rig_exec(r, step);
    return kvleaf_append_attend(plan_of(r, step), layer, &t.k, &t.v, &t.q, &t.out, &t.lse, &exec);
}

/* Reads an output back and checks that nothing beside its rows was written. */
static void collect(const rig *r, const rig_step *step, cl_mem buffer, size_t row, int32_t rows, void *to,
                    const char *what)
{
    size_t size = (size_t)(r->p.max_tokens + 2 * GUARD_ROWS) * row;
    assert_int_equal(clFinish(queue_of(r, step)), CL_SUCCESS); /* it may be out-of-order */
    uint8_t *host = support_read(queue_of(r, step), buffer, size);
    for (size_t i = 0; i < size; i++) {
        bool output = i >= GUARD_ROWS * row && i < (size_t)(GUARD_ROWS + rows) * row;
        if (!output && host[i] != CANARY)
            fail_msg("%s: byte %zu of a buffer was written, %d rows of %zu bytes are the output", what, i, rows, row);
    }
    memcpy(to, host + GUARD_ROWS * row, (size_t)rows * row);
    free(host);
}

static void check_seq(rig *r, const rig_step *step, int32_t layer, int32_t index, int32_t first_row, const char *what)
{
    const rig_seq *seq = step->seqs[index];
    int32_t dim = rig_dim(r, layer), q_len = step->num_q[index], kv_len = seq->committed + q_len,
            heads = r->p.num_heads;
    size_t kv_size = (size_t)(kv_len * r->p.num_kv_heads * dim), q_size = (size_t)(q_len * heads * dim), at = 0;
    float *k = malloc(kv_size * sizeof *k), *v = malloc(kv_size * sizeof *v);
    double *q = malloc(q_size * sizeof *q), *out = malloc(q_size * sizeof *out);
    double *lse = malloc((size_t)(q_len * heads) * sizeof *lse);
    for (int32_t t = 0; t < kv_len; t++)
        for (int32_t h = 0; h < r->p.num_kv_heads; h++)
            for (int32_t d = 0; d < dim; d++, at++) {
                k[at] = stored(r, 'k', r->source[layer], seq->tokens[t], h, d);
                v[at] = stored(r, 'v', r->source[layer], seq->tokens[t], h, d);
            }
    at = 0;
    for (int32_t t = 0; t < q_len; t++)
        for (int32_t h = 0; h < heads; h++)
            for (int32_t d = 0; d < dim; d++)
                q[at++] = given(r, 'q', layer, seq->tokens[seq->committed + t], h, d);
    const reference_kv kv = {.k = k,
                             .v = v,
                             .dtype = KVLEAF_F32,
                             .layout = KVLEAF_LAYOUT_STRIDED,
                             .head_dim = dim,
                             .k_token_stride = r->p.num_kv_heads * dim,
                             .k_head_stride = dim,
                             .v_token_stride = r->p.num_kv_heads * dim,
                             .v_head_stride = dim};
    const reference_seq reference = {.q_len = q_len,
                                     .kv_len = kv_len,
                                     .causal = step->mask == KVLEAF_MASK_CAUSAL,
                                     .window = r->p.window[layer],
                                     .softcap = r->p.softcap[layer]};
    assert_true(reference_attend(&kv, &reference, heads, r->p.num_kv_heads, reference_scale(0, dim), q, out, lse));
    double tolerance = reference_tolerance(r->p.q_dtype, r->p.kv_dtype, r->p.out_dtype);
    for (int32_t row = 0; row < q_len; row++)
        for (int32_t h = 0; h < heads; h++) {
            float actual[256];
            for (int32_t d = 0; d < dim; d++)
                actual[d] = reference_load(r->p.out_dtype, rig_out(r, layer, first_row + row), (size_t)(h * dim + d));
            double error =
                reference_row_error(out + ((size_t)row * (size_t)heads + (size_t)h) * (size_t)dim, actual, dim);
            double lse_error = reference_lse_error(lse[row * heads + h], rig_lse(r, layer, first_row + row)[h],
                                                   r->p.q_dtype, r->p.kv_dtype, r->p.out_dtype);
            if (!(error <= tolerance) || !(lse_error <= 1))
                fail_msg("%s: layer %d, entry %d, row %d, head %d: error %g (at most %g), LSE %g (at most 1)", what,
                         layer, index, row, h, error, tolerance, lse_error);
        }
    free(k);
    free(v);
    free(q);
    free(out);
    free(lse);
}

static uint8_t *out_of(const rig *r, int32_t layer)
{
    size_t row = (size_t)(r->p.num_heads * largest_dim(r)) * kvleaf_dtype_size(r->p.out_dtype);
    return r->out_bits + (size_t)(layer * r->p.max_tokens) * row;
}

void rig_check(rig *r, const rig_step *step, int32_t layer, const char *what)
{
    int32_t rows = 0;
    for (int32_t i = 0; i < step->n; i++)
        rows += step->num_q[i];
    size_t first = (size_t)layer * (size_t)r->p.max_tokens;
    collect(r, step, r->out, rig_row_bytes(r, layer), rows, out_of(r, layer), what);
    collect(r, step, r->lse, (size_t)r->p.num_heads * sizeof(float), rows,
            r->lse_values + first * (size_t)r->p.num_heads, what);
    rows = 0;
    for (int32_t i = 0; i < step->n; i++) {
        check_seq(r, step, layer, i, rows, what);
        rows += step->num_q[i];
    }
}

void rig_layers(rig *r, const rig_step *step, const char *what)
{
    for (int32_t layer = 0; layer < r->p.num_layers; layer++) {
        bool owns = !r->p.kv_layer[layer];
        rig_load(r, step, layer);
        if (owns && layer % 2 == !r->p.fused_first) {
            ASSERT_OK(rig_append_attend(r, step, layer));
        } else {
            if (owns)
                ASSERT_OK(rig_append(r, step, layer));
            ASSERT_OK(rig_attend(r, step, layer));
        }
        rig_check(r, step, layer, what);
    }
}

void rig_commit(rig *r, const rig_step *step, const int32_t *accepted)
{
    ASSERT_OK(kvleaf_plan_commit(plan_of(r, step), accepted));
    for (int32_t i = 0; i < step->n; i++) {
        int32_t taken = accepted ? accepted[i] : step->num_q[i];
        step->seqs[i]->committed += taken;
        if (taken < step->num_q[i])
            cut(step->seqs[i], step->seqs[i]->committed);
        rig_check_lengths(r, step->seqs[i], step->seqs[i]->committed);
    }
}

size_t rig_row_bytes(const rig *r, int32_t layer)
{
    return (size_t)(r->p.num_heads * rig_dim(r, layer)) * kvleaf_dtype_size(r->p.out_dtype);
}

const uint8_t *rig_out(const rig *r, int32_t layer, int32_t row)
{
    return out_of(r, layer) + (size_t)row * rig_row_bytes(r, layer);
}

const float *rig_lse(const rig *r, int32_t layer, int32_t row)
{
    return r->lse_values + (size_t)((layer * r->p.max_tokens + row) * r->p.num_heads);
}

uint8_t *rig_pool_bytes(const rig *r, int32_t layer, size_t *size)
{
    cl_mem memory = memory_of(r, layer, size);
    assert_int_equal(clFinish(r->queue), CL_SUCCESS); /* it may be out-of-order */
    return support_read(r->queue, memory, *size);
}

/* The same for K or V of one layer. */
static void check_side(const rig *r, const rig_seq *seq, int32_t layer, bool value, const char *what)
{
    kvleaf_pool_params pool = {.struct_size = sizeof pool};
    ASSERT_OK(kvleaf_pool_query(r->pools[r->group[layer]], &pool));
    int32_t table[RIG_LENGTH], count = 0, dim = pool.head_dim_k, heads = pool.num_kv_heads;
    ASSERT_OK(kvleaf_seq_table(r->cache, seq->seq, r->group[layer], table, RIG_LENGTH, &count));
    size_t tile = kvleaf_layout_tile(pool.layout, pool.block_size, dim), size;
    uint8_t *bytes = rig_pool_bytes(r, layer, &size);
    for (int32_t t = 0; t < seq->committed; t++)
        for (int32_t h = 0; h < heads && table[t / pool.block_size] != KVLEAF_NO_BLOCK; h++)
            for (int32_t d = 0; d < dim; d++) {
                size_t side = 2 * (size_t)table[t / pool.block_size] + (size_t)value;
                size_t at = (side * (size_t)heads + (size_t)h) * tile +
                            kvleaf_layout_offset(pool.layout, value, pool.block_size, dim, t % pool.block_size, d);
                float expected = stored(r, value ? 'v' : 'k', r->source[layer], seq->tokens[t], h, d);
                if (reference_load(r->p.kv_dtype, bytes, at) != expected)
                    fail_msg("%s: layer %d, %s of token %d, head %d, dim %d is not what was written", what, layer,
                             value ? "V" : "K", t, h, d);
            }
    free(bytes);
}

void rig_check_stored(rig *r, const rig_seq *seq, const char *what)
{
    for (int32_t i = 0; i < 2 * r->p.num_layers; i++)
        if (r->source[i / 2] == i / 2)
            check_side(r, seq, i / 2, i % 2, what);
}

uint8_t *rig_rows(const rig *r, const rig_seq *seq, int32_t start, int32_t count, uint64_t *size)
{
    uint8_t *rows = NULL;
    size_t at = 0, elements = 0;
    for (int32_t layer = 0; layer < r->p.num_layers; layer++)
        if (r->source[layer] == layer)
            elements += 2 * (size_t)(count * r->p.num_kv_heads * rig_dim(r, layer));
    *size = elements * kvleaf_dtype_size(r->p.kv_dtype);
    rows = calloc(elements + 1, kvleaf_dtype_size(r->p.kv_dtype));
    for (int32_t group = 0; group < r->num_groups; group++)
        for (int32_t side = 0; side < 2 * r->p.num_layers; side++)
            for (int32_t t = start, layer = side / 2; t < start + count; t++)
                for (int32_t h = 0; h < r->p.num_kv_heads && r->group[layer] == group; h++)
                    for (int32_t d = 0; d < rig_dim(r, layer) && r->source[layer] == layer; d++)
                        reference_store(r->p.kv_dtype, rows, at++,
                                        stored(r, side % 2 ? 'v' : 'k', layer, seq->tokens[t], h, d));
    assert_int_equal(at, elements);
    return rows;
}
