/* SPDX-License-Identifier: Apache-2.0 */
/* The launch that belongs to the trial of a variant. All inputs are small multiples of powers of two, which every
 * element type holds exactly, and follow from their places, so that the reference needs no copy of them. */
#include "attention/trial.h"

#include "attention/engine.h"
#include "pool/pool.h"

#include <math.h>
#include <string.h>

enum { Q, K, V, FRESH_K, FRESH_V, OUT, LSE, OUT_AGAIN, LSE_AGAIN, ARRAYS };

enum {
    MOST_KV_HEADS = 2,
    MOST_WINDOW = 100,
    USUAL_SPLIT = 128, /* of a variant that has none */
    LONG_MORE = 70,    /* keys of the longest sequence beyond two splits, or a part where runs come in parts */
    LONG_QUERY = 150,  /* its rows in prefill: more than a tile */
    SHORT_KEYS = 37,
    SHORT_QUERY = 5,
    TINY_KEYS = 5,
    SAMPLE = 11,   /* one row in so many is compared */
    ALIGNMENT = 64 /* of an array on the host, bytes */
};

/* Of unit-sized values: what rounding weights and outputs to bf16 leaves room for, far from what is wrong. */
#define TOLERANCE 0.02
#define SHARPNESS 4 /* scores spread so many times as far as usual */

typedef struct array {
    kvleaf_dtype dtype;
    size_t elements, bytes;
    size_t start; /* in the host memory, bytes */
    cl_mem memory;
} array;

typedef struct trial {
    kvleaf_device *device;
    const kvl_variant *variant;
    kvl_geometry geometry;
    bool decodes, appends;
    kvl_engine *engine;
    cl_command_queue queue;
    kvl_step_seq *seqs; /* table: the first column of its own in the one table, or its first token */
    int32_t num_seqs, total_q, total_k, columns, longest;
    float scale;
    double *weights; /* [longest] */
    array arrays[ARRAYS];
    char *host; /* of all arrays */
} trial;

/* -1 .. 1 in steps of 1/16. */
static float sample(int which, int64_t row, int32_t dim)
{
    uint32_t x = ((uint32_t)row * 256u + (uint32_t)dim + 0x9e3779b9u * (uint32_t)(which + 1)) * 2654435761u;
    x = (x ^ x >> 15) * 2246822519u;
    x ^= x >> 13;
    return (float)((int32_t)(x % 33u) - 16) / 16.0f;
}

static char *host_of(const trial *t, int which, size_t element)
{
    return t->host + t->arrays[which].start + element * kvleaf_dtype_size(t->arrays[which].dtype);
}

/* Exact for what sample gives. */
static void store(trial *t, int which, size_t at, float value)
{
    kvleaf_dtype dtype = t->arrays[which].dtype;
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t half = (uint16_t)(bits >> 16);
    if (dtype == KVLEAF_F16)
        half = (uint16_t)(value == 0 ? 0 : (bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3ffffu) - (112u << 10)));
    if (dtype == KVLEAF_F32)
        memcpy(host_of(t, which, at), &value, sizeof value);
    else
        memcpy(host_of(t, which, at), &half, sizeof half);
}

static void store_nan(trial *t, int which, size_t at)
{
    memset(host_of(t, which, at), 0xff, kvleaf_dtype_size(t->arrays[which].dtype));
}

static double load(const trial *t, int which, size_t at)
{
    kvleaf_dtype dtype = t->arrays[which].dtype;
    float value;
    uint16_t half;
    if (dtype == KVLEAF_F32) {
        memcpy(&value, host_of(t, which, at), sizeof value);
        return value;
    }
    memcpy(&half, host_of(t, which, at), sizeof half);
    if (dtype == KVLEAF_F16) {
        int32_t exponent = half >> 10 & 31, fraction = half & 1023;
        double size = exponent ? ldexp(fraction + 1024, exponent - 25) : ldexp(fraction, -24);
        return exponent == 31 ? (double)NAN : half >> 15 ? -size : size;
    }
    uint32_t bits = (uint32_t)half << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The geometry with as few heads and as small a window as show everything: the program is the same. */
static kvl_geometry shrink(const kvl_geometry *geometry)
{
    kvl_geometry small = *geometry;
    if (small.num_kv_heads > MOST_KV_HEADS) {
        small.num_heads = geometry->num_heads / geometry->num_kv_heads * MOST_KV_HEADS;
        small.num_kv_heads = MOST_KV_HEADS;
    }
    if (small.window > MOST_WINDOW)
        small.window = MOST_WINDOW;
    return small;
}

/* A long, a short and many tiny sequences, more pieces of work than compute units. */
static bool plan_sequences(trial *t)
{
    int32_t split = t->variant->split_tokens ? t->variant->split_tokens : USUAL_SPLIT;
    int32_t block = t->geometry.block_size;
    t->num_seqs = 3 + (int32_t)t->device->caps.compute_units / t->geometry.num_kv_heads;
    bool parts = kvl_longest_run_keys(t->variant, &t->geometry) > KVL_PART_KEYS;
    t->longest = (parts ? KVL_PART_KEYS : 2 * split) + LONG_MORE;
    t->seqs = kvl_alloc(&t->device->allocator, (size_t)t->num_seqs, sizeof *t->seqs);
    t->weights = kvl_alloc(&t->device->allocator, (size_t)t->longest, sizeof *t->weights);
    for (int32_t i = 0; t->seqs && i < t->num_seqs; i++) {
        kvl_step_seq *seq = &t->seqs[i];
        seq->kv_len = i == 0 ? t->longest : i == 1 ? SHORT_KEYS : TINY_KEYS;
        seq->q_len = t->decodes || i > 1 ? 1 : i == 0 ? LONG_QUERY : SHORT_QUERY;
        seq->family = t->decodes ? KVLEAF_FAMILY_DECODE : KVLEAF_FAMILY_PREFILL;
        seq->table = block ? t->columns : t->total_k;
        t->total_q += seq->q_len;
        t->total_k += seq->kv_len;
        t->columns += block ? (int32_t)kvl_ceil_div(seq->kv_len, block) : 0;
    }
    return t->seqs && t->weights;
}

static int32_t block_of(const trial *t, int32_t column)
{
    return t->columns - 1 - column;
}

/* Where an element of a sequence's key or value lies; a strided view has rows in blocks. */
static size_t place(const trial *t, bool value, const kvl_step_seq *seq, int32_t key, int32_t head, int32_t dim)
{
    const kvl_geometry *g = &t->geometry;
    size_t heads = (size_t)g->num_kv_heads;
    if (!g->block_size)
        return ((size_t)(seq->table + key) * heads + (size_t)head) * (size_t)g->head_dim + (size_t)dim;
    size_t block = (size_t)block_of(t, seq->table + key / g->block_size);
    return (block * heads + (size_t)head) * kvleaf_layout_tile(g->layout, g->block_size, g->head_dim) +
           kvleaf_layout_offset(g->layout, value, g->block_size, g->head_dim, key % g->block_size, dim);
}

/* What the element is: unlike any other sequence's. */
static float key_or_value(const trial *t, int which, const kvl_step_seq *seq, int32_t key, int32_t head, int32_t dim)
{
    int64_t token = (int64_t)(seq - t->seqs) * t->longest + key;
    return sample(which, token * t->geometry.num_kv_heads + head, dim);
}

/* Keys or values of a sequence; NaN in the slots behind them and in the one that is appended to. */
static void fill_sequence(trial *t, int which, const kvl_step_seq *seq)
{
    const kvl_geometry *g = &t->geometry;
    int32_t there = seq->kv_len - (t->appends ? 1 : 0), end = seq->kv_len;
    if (g->block_size)
        end = (int32_t)kvl_ceil_div(end, g->block_size) * g->block_size;
    for (int32_t key = 0; key < end; key++)
        for (int32_t head = 0; head < g->num_kv_heads; head++)
            for (int32_t dim = 0; dim < g->head_dim; dim++) {
                size_t at = place(t, which == V, seq, key, head, dim);
                if (key < there)
                    store(t, which, at, key_or_value(t, which, seq, key, head, dim));
                else
                    store_nan(t, which, at);
            }
}

/* The newest key or value of each sequence. */
static void fill_fresh(trial *t, int which, int from)
{
    const kvl_geometry *g = &t->geometry;
    size_t at = 0;
    for (int32_t i = 0; i < t->num_seqs; i++)
        for (int32_t head = 0; head < g->num_kv_heads; head++)
            for (int32_t dim = 0; dim < g->head_dim; dim++)
                store(t, which, at++, key_or_value(t, from, &t->seqs[i], t->seqs[i].kv_len - 1, head, dim));
}

static void fill(trial *t)
{
    const kvl_geometry *g = &t->geometry;
    int64_t rows = (int64_t)t->total_q * g->num_heads;
    for (int64_t row = 0; row < rows; row++)
        for (int32_t dim = 0; dim < g->head_dim; dim++)
            store(t, Q, (size_t)(row * g->head_dim + dim), sample(Q, row, dim));
    for (int32_t i = 0; i < t->num_seqs; i++) {
        fill_sequence(t, K, &t->seqs[i]);
        fill_sequence(t, V, &t->seqs[i]);
    }
    if (t->appends) {
        fill_fresh(t, FRESH_K, K);
        fill_fresh(t, FRESH_V, V);
    }
    for (int which = OUT; which < ARRAYS; which++)
        memset(host_of(t, which, 0), 0xff, t->arrays[which].bytes);
}

/* Host memory of all arrays; the outputs with a row more, which nothing writes. */
static kvleaf_status make_host(trial *t)
{
    const kvl_geometry *g = &t->geometry;
    size_t heads = (size_t)g->num_heads, kv_heads = (size_t)g->num_kv_heads, dim = (size_t)g->head_dim;
    size_t rows = (size_t)t->total_q, fresh = (size_t)t->num_seqs * kv_heads * dim, kv = (size_t)t->total_k * dim;
    if (g->block_size)
        kv = (size_t)t->columns * kvleaf_layout_tile(g->layout, g->block_size, g->head_dim);
    const array shapes[ARRAYS] = {
        [Q] = {g->q_dtype, rows * heads * dim},
        [K] = {g->kv_dtype, kv * kv_heads},
        [V] = {g->kv_dtype, kv * kv_heads},
        [FRESH_K] = {g->kv_dtype, fresh},
        [FRESH_V] = {g->kv_dtype, fresh},
        [OUT] = {g->out_dtype, (rows + 1) * heads * dim},
        [LSE] = {KVLEAF_F32, (rows + 1) * heads},
        [OUT_AGAIN] = {g->out_dtype, (rows + 1) * heads * dim},
        [LSE_AGAIN] = {KVLEAF_F32, (rows + 1) * heads},
    };
    size_t bytes = 0;
    for (int which = 0; which < ARRAYS; which++) {
        array *a = &t->arrays[which];
        *a = shapes[which];
        a->bytes = a->elements * kvleaf_dtype_size(a->dtype);
        a->start = bytes;
        bytes += (a->bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    t->host = kvl_alloc(&t->device->allocator, bytes, 1);
    return t->host ? KVLEAF_OK : kvl_fail_memory(bytes);
}

static kvleaf_status make_buffers(trial *t)
{
    for (int which = 0; which < ARRAYS; which++) {
        array *a = &t->arrays[which];
        cl_int error = CL_SUCCESS;
        a->memory = t->device->cl->CreateBuffer(t->device->context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, a->bytes,
                                                host_of(t, which, 0), &error);
        if (!a->memory)
            return kvl_fail_opencl("clCreateBuffer", error);
    }
    return kvleaf_device_queue_create(t->device, &t->queue);
}

static kvleaf_status make_engine(trial *t)
{
    char key[128];
    const kvl_engine_params params = {
        .geometry = t->geometry,
        .operations = 1u << (t->decodes ? KVL_DECODE : KVL_PREFILL),
        .max_seqs = t->num_seqs,
        .max_tokens = t->total_q,
        .max_context = t->longest,
        .max_decode_keys = t->total_k,
        .max_table = t->columns,
        .steps_in_flight = 2,
    };
    kvleaf_status status = kvl_engine_create(t->device, &params, &t->engine);
    if (status)
        return status;
    kvl_variant_key(t->variant, &t->geometry, key, sizeof key);
    const char *used = kvl_engine_variant(t->engine, t->variant->family);
    return strcmp(used, key) ? kvl_fail(KVLEAF_UNSUPPORTED, "variant", 0, 0, "%s is in use instead of it", used)
                             : KVLEAF_OK;
}

static kvleaf_status submit(trial *t, kvl_chain *chain)
{
    const kvl_counts counts = {.num_slots = t->appends ? t->num_seqs : 0, .num_table = t->columns};
    kvl_staging staging;
    kvleaf_status status = kvl_engine_begin(t->engine, &counts, &staging);
    if (status)
        return status;
    for (int32_t column = 0; column < t->columns; column++)
        staging.table[column] = block_of(t, column);
    for (int32_t i = 0; i < counts.num_slots; i++) {
        int32_t newest = t->seqs[i].kv_len - 1, block = t->geometry.block_size;
        staging.slots[i] = (int64_t)block_of(t, t->seqs[i].table + newest / block) * block + newest % block;
    }
    const kvl_step step = {.seqs = t->seqs,
                           .num_seqs = t->num_seqs,
                           .num_blocks = t->columns,
                           .slots = t->appends ? KVL_SLOTS_OWN : KVL_SLOTS_ANYWHERE};
    return kvl_engine_submit(t->engine, &step, chain);
}

static kvleaf_tensor tensor(const trial *t, int which)
{
    return (kvleaf_tensor){.handle = t->arrays[which].memory, .dtype = t->arrays[which].dtype};
}

static kvleaf_status bind_view(const trial *t, kvl_view *out)
{
    const kvl_geometry *g = &t->geometry;
    kvleaf_kv_view view = {.struct_size = sizeof view,
                           .k = tensor(t, K),
                           .v = tensor(t, V),
                           .layout = g->layout,
                           .num_blocks = t->columns};
    if (g->layout == KVLEAF_LAYOUT_STRIDED && g->block_size) {
        view.k.token_stride = view.v.token_stride = g->head_dim;
        view.k.head_stride = view.v.head_stride = (int64_t)g->head_dim * g->block_size;
    }
    return kvl_engine_view(t->engine, &view, out);
}

/* With the append, where decode makes it. */
static kvleaf_status attend(trial *t, const kvl_view *view, kvl_chain *chain)
{
    const kvleaf_tensor q = tensor(t, Q), k = tensor(t, FRESH_K), v = tensor(t, FRESH_V);
    const kvleaf_tensor out = tensor(t, OUT), lse = tensor(t, LSE);
    const kvl_fresh fresh = {&k, &v};
    kvleaf_status status = submit(t, chain);
    if (status)
        return status;
    return t->appends ? kvl_engine_append_attend(t->engine, &fresh, &q, view, &out, &lse, t->scale, chain)
                      : kvl_engine_attend(t->engine, &q, view, &out, &lse, t->scale, chain);
}

/* Without it, and as for a device of one compute unit. */
static kvleaf_status attend_again(trial *t, const kvl_view *view, kvl_chain *chain)
{
    const kvleaf_tensor q = tensor(t, Q), out = tensor(t, OUT_AGAIN), lse = tensor(t, LSE_AGAIN);
    kvl_engine_set_units(t->engine, 1);
    kvleaf_status status = submit(t, chain);
    if (!status)
        status = kvl_engine_attend(t->engine, &q, view, &out, &lse, t->scale, chain);
    return status;
}

/* Both; then the outputs are in host memory. */
static kvleaf_status launch(trial *t)
{
    kvl_chain chain;
    kvl_view view;
    kvleaf_status status = kvl_chain_begin(&chain, t->device, &(kvleaf_exec){.queue = t->queue});
    if (!status)
        status = bind_view(t, &view);
    if (!status)
        status = attend(t, &view, &chain);
    if (!status)
        status = attend_again(t, &view, &chain);
    for (int which = OUT; !status && which < ARRAYS; which++)
        status = kvl_chain_read(&chain, t->arrays[which].memory, 0, t->arrays[which].bytes, host_of(t, which, 0), true);
    return kvl_chain_end(&chain, status);
}

static kvleaf_status wrong(const char *what, int32_t row, int32_t head, double value, double expected)
{
    return kvl_fail(KVLEAF_UNSUPPORTED, "trial", row, head, "%s of row %d, head %d is %.4g, expected %.4g", what,
                    (int)row, (int)head, value, expected);
}

/* Row `row` of the batch, which is `row_of_seq` of its sequence. */
static kvleaf_status check_row(trial *t, const kvl_step_seq *seq, int32_t row_of_seq, int32_t row, int32_t head)
{
    const kvl_geometry *g = &t->geometry;
    int32_t end = seq->kv_len - seq->q_len + row_of_seq + 1, kv_head = head / (g->num_heads / g->num_kv_heads);
    int32_t first = g->window && g->window < end ? end - g->window : 0;
    int64_t at = (int64_t)row * g->num_heads + head;
    double largest = -INFINITY, sum = 0;
    for (int32_t key = first; key < end; key++) {
        double score = 0;
        for (int32_t dim = 0; dim < g->head_dim; dim++)
            score += (double)sample(Q, at, dim) * (double)key_or_value(t, K, seq, key, kv_head, dim);
        score *= (double)t->scale;
        t->weights[key] = g->softcap > 0 ? (double)g->softcap * tanh(score / (double)g->softcap) : score;
        largest = t->weights[key] > largest ? t->weights[key] : largest;
    }
    for (int32_t key = first; key < end; key++)
        sum += t->weights[key] = exp(t->weights[key] - largest);
    double lse = load(t, LSE, (size_t)at), expected_lse = sum > 0 ? largest + log(sum) : -INFINITY;
    if (!(fabs(lse - expected_lse) <= TOLERANCE))
        return wrong("the LSE", row, head, lse, expected_lse);
    for (int32_t dim = 0; dim < g->head_dim; dim++) {
        double expected = 0, value = load(t, OUT, (size_t)(at * g->head_dim + dim));
        for (int32_t key = first; key < end; key++)
            expected += t->weights[key] / sum * (double)key_or_value(t, V, seq, key, kv_head, dim);
        if (!(fabs(value - expected) <= TOLERANCE))
            return wrong("an output", row, head, value, expected);
    }
    return KVLEAF_OK;
}

/* The launches agree to the last bit, and what is no output is as it was. */
static kvleaf_status check_bits(const trial *t)
{
    for (int which = OUT; which <= LSE; which++) {
        size_t bytes = t->arrays[which].bytes, row = bytes / ((size_t)t->total_q + 1);
        const char *once = host_of(t, which, 0), *again = host_of(t, which + OUT_AGAIN - OUT, 0);
        for (size_t at = bytes - row; at < bytes; at++)
            if ((unsigned char)once[at] != 0xff)
                return kvl_fail(KVLEAF_UNSUPPORTED, "trial", (int64_t)at, 0, "a byte behind the outputs was written");
        if (memcmp(once, again, bytes) != 0)
            return kvl_fail(KVLEAF_UNSUPPORTED, "trial", 0, 0, "a second launch gave other bits");
    }
    return KVLEAF_OK;
}

static kvleaf_status check(trial *t)
{
    kvleaf_status status = KVLEAF_OK;
    for (int32_t i = 0, row = 0; i < t->num_seqs; i++)
        for (int32_t r = 0; r < t->seqs[i].q_len; r++, row++)
            for (int32_t head = 0; head < t->geometry.num_heads && !status; head++)
                if (r % SAMPLE == 0 || r == t->seqs[i].q_len - 1)
                    status = check_row(t, &t->seqs[i], r, row, head);
    return status ? status : check_bits(t);
}

static void release(trial *t)
{
    const kvleaf_opencl *cl = t->device->cl;
    if (t->queue)
        cl->Finish(t->queue);
    kvl_engine_destroy(&t->engine);
    for (int which = 0; which < ARRAYS; which++) {
        if (t->arrays[which].memory)
            cl->ReleaseMemObject(t->arrays[which].memory);
    }
    if (t->queue)
        cl->ReleaseCommandQueue(t->queue);
    kvl_free(&t->device->allocator, t->host);
    kvl_free(&t->device->allocator, t->weights);
    kvl_free(&t->device->allocator, t->seqs);
}

/* All that is needed before the variant runs: what fails here says nothing of how it does. */
static kvleaf_status prepare(trial *t)
{
    kvleaf_status status = plan_sequences(t) ? make_host(t) : kvl_fail_memory((size_t)t->longest * sizeof *t->weights);
    if (!status) {
        fill(t);
        status = make_buffers(t);
    }
    if (!status)
        status = make_engine(t);
    const kvleaf_error *error = kvleaf_last_error();
    return status != KVLEAF_DEVICE ? status
                                   : kvl_fail(KVLEAF_UNSUPPORTED, "trial", error->cl_error, 0,
                                              "%s failed with OpenCL error %d", error->field, (int)error->cl_error);
}

kvleaf_status kvl_trial_launch(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry)
{
    trial t = {.device = device, .variant = variant, .geometry = shrink(geometry)};
    t.decodes = strcmp(variant->family, kvl_operation_name(KVL_DECODE)) == 0;
    t.appends = t.decodes && geometry->block_size && !geometry->device_tables;
    t.scale = (float)(SHARPNESS / sqrt(geometry->head_dim));
    kvleaf_status status = prepare(&t);
    if (!status)
        status = launch(&t);
    if (!status)
        status = check(&t);
    release(&t);
    return status;
}
