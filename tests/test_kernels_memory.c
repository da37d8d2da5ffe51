/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that move K and V: append, gather, table update, in both families, every layout, every dtype, through
 * views with gaps and odd offsets. Every byte of every buffer is compared: what must be written is, nothing else
 * changes. */
#include <math.h>

#include "attention/variants.h"
#include "moves.h"
#include "reference.h"

enum { META_INTS = 8192, TAIL = 64 }; /* TAIL: elements of a guard zone */

typedef enum placement { NHD, HND, PACKED_ROWS, PACKED_CPU16, PACKED_DIM8, PACKED_SWIZZLE8, PLACEMENTS } placement;

static const kvleaf_layout layouts[PLACEMENTS] = {KVLEAF_LAYOUT_STRIDED, KVLEAF_LAYOUT_STRIDED, KVLEAF_LAYOUT_ROWS,
                                                  KVLEAF_LAYOUT_CPU16,   KVLEAF_LAYOUT_DIM8,    KVLEAF_LAYOUT_SWIZZLE8};

/* The CPU kernels leave swizzle8 to GPUs. */
static int placements(int cpu)
{
    return cpu ? PACKED_SWIZZLE8 : PLACEMENTS;
}

/* One pool buffer: K or V. */
typedef struct pool_side {
    bool value;
    cl_long4 view; /* offset, block, token, head stride */
    size_t bytes;
    unsigned char *host; /* what the buffer must hold */
    cl_mem buffer;
} pool_side;

typedef struct geometry {
    bool cpu;
    int work_group; /* portable */
    placement place;
    kvleaf_dtype kv_dtype, source_dtype;
    int32_t num_kv_heads, head_dim, block_size, num_blocks;
} geometry;

/* A layout and a dtype make a program, and hardly know of each other: each layout has one of the three dtypes, by turns
 * from a random first one. The units of CPU16 that the CPU kernels transpose have both widths of elements. */
static bool is_paired(kvl_operation operation, int cpu, int place, int dtype)
{
    static int first = -1;
    first = first < 0 ? random_below(3) : first;
    int turn = (first + (int)layouts[place] + cpu + (operation == KVL_GATHER)) % 3;
    bool other_width = cpu && place == PACKED_CPU16 && dtype == (turn == KVLEAF_F32 ? KVLEAF_F16 : KVLEAF_F32);
    return dtype == turn || other_width;
}

static kvleaf_dtype paired_dtype(kvl_operation operation, int cpu, int place)
{
    int dtype = KVLEAF_F16;
    while (!is_paired(operation, cpu, place, dtype))
        dtype++;
    return (kvleaf_dtype)dtype;
}

static int32_t pick(const int32_t *list, int count)
{
    return list[random_below(count)];
}

/* A geometry of the family, placement and dtypes; sizes at random from those that have edges. */
static geometry random_geometry(bool cpu, placement place, kvleaf_dtype kv_dtype)
{
    static const int32_t dims[] = {1, 8, 15, 16, 17, 20, 64, 72, 80, 96, 112, 128, 192, 250, 256};
    static const int32_t heads[] = {1, 2, 3, 5, 8};
    static const int32_t sizes[] = {1, 3, 4, 7, 8, 16, 24, 32, 48, 64, 256};
    geometry g = {.cpu = cpu, .work_group = cpu ? 1 : 64, .place = place, .kv_dtype = kv_dtype};
    g.source_dtype = (kvleaf_dtype)random_below(3);
    g.head_dim = pick(dims, COUNT(dims));
    g.num_kv_heads = pick(heads, COUNT(heads));
    do
        g.block_size = pick(sizes, COUNT(sizes));
    while (kvl_layout_refuses(layouts[place], g.block_size));
    g.num_blocks = 200 / g.block_size + 3;
    return g;
}

static void print_geometry(const geometry *g, const char *what)
{
    static const char *const names[] = {"nhd", "hnd", "rows", "cpu16", "dim8", "swizzle8"};
    printf("%s.%s %s kv_%s source_%s heads %d d%d b%d blocks %d\n", what, g->cpu ? "cpu" : "portable", names[g->place],
           kvleaf_dtype_name(g->kv_dtype), kvleaf_dtype_name(g->source_dtype), g->num_kv_heads, g->head_dim,
           g->block_size, g->num_blocks);
}

/* None in half of the cases, so that whole cache lines are met as well as torn ones. */
static int32_t gap(int32_t limit)
{
    return random_below(2) ? 0 : random_below(limit);
}

/* Strided views have gaps between tokens, heads and blocks; packed ones lie tile by tile, with a gap between blocks. */
static pool_side make_side(const geometry *g, bool value)
{
    int64_t offset = gap(9), token, head, block;
    if (g->place == NHD) {
        head = g->head_dim + gap(3);
        token = head * g->num_kv_heads + gap(3);
        block = token * g->block_size + gap(3);
    } else if (g->place == HND) {
        token = g->head_dim + gap(3);
        head = token * g->block_size + gap(3);
        block = head * g->num_kv_heads + gap(3);
    } else {
        token = 0;
        head = (int64_t)kvleaf_layout_tile(layouts[g->place], g->block_size, g->head_dim);
        block = head * g->num_kv_heads + gap(3);
    }
    pool_side side = {.value = value, .view = {{offset, block, token, head}}};
    side.bytes = (size_t)(offset + block * g->num_blocks + TAIL) * kvleaf_dtype_size(g->kv_dtype);
    side.host = random_bytes(side.bytes);
    side.buffer = make_buffer(side.bytes, side.host);
    return side;
}

static size_t side_index(const geometry *g, const pool_side *side, int64_t block, int32_t token, int32_t head,
                         int32_t dim)
{
    int64_t tile = side->view.s[0] + block * side->view.s[1] + head * side->view.s[3];
    if (layouts[g->place] == KVLEAF_LAYOUT_STRIDED)
        return (size_t)(tile + token * side->view.s[2] + dim);
    return (size_t)tile + kvleaf_layout_offset(layouts[g->place], side->value, g->block_size, g->head_dim, token, dim);
}

/* Built as the library builds it, on a device of whatever kind; it has one kernel. */
static cl_kernel geometry_kernel(const geometry *g, kvl_operation operation)
{
    const kvl_geometry asked = {.q_dtype = g->kv_dtype,
                                .kv_dtype = g->kv_dtype,
                                .out_dtype = g->kv_dtype,
                                .layout = layouts[g->place],
                                .num_heads = 2 * g->num_kv_heads,
                                .num_kv_heads = g->num_kv_heads,
                                .head_dim = g->head_dim,
                                .block_size = g->block_size};
    int count;
    const kvl_variant *rows = kvl_variants(operation, &count), *row = rows;
    while (strcmp(row->name, g->cpu ? "cpu" : "portable") != 0)
        assert_true(++row < rows + count);
    kvl_variant variant = *row;
    variant.refuses = NULL;
    variant.work_group = variant.min_work_group = g->work_group;
    kvl_chosen chosen = {0};
    cl_kernel kernel;
    ASSERT_OK(kvl_variant_try(device, &variant, &asked, &chosen));
    ASSERT_OK(kvl_device_kernel(device, chosen.program, variant.kernels[0], &kernel));
    return kernel;
}

static cl_int4 geometry_shape(const geometry *g)
{
    return (cl_int4){{2 * g->num_kv_heads, g->num_kv_heads, g->head_dim, g->block_size}};
}

static void launch_rows(const geometry *g, cl_kernel kernel, const kvl_arg *args, int count, int32_t rows)
{
    if (g->cpu)
        launch(kernel, args, count, (size_t)g->num_kv_heads, (size_t)((rows + 15) / 16), 1);
    else
        launch(kernel, args, count, (size_t)rows * (size_t)g->work_group, (size_t)g->num_kv_heads,
               (size_t)g->work_group);
    clReleaseKernel(kernel);
}

/* Rows [tokens, heads, head_dim] with gaps. */
typedef struct rows {
    kvleaf_dtype dtype;
    cl_long4 view; /* offset, token stride, head stride, dtype */
    size_t bytes;
    unsigned char *host;
    cl_mem buffer;
} rows;

static rows make_rows(const geometry *g, kvleaf_dtype dtype, int32_t tokens)
{
    int64_t head = g->head_dim + random_below(3), token = head * g->num_kv_heads + random_below(3);
    rows r = {.dtype = dtype, .view = {{random_below(5), token, head, dtype}}};
    r.bytes = (size_t)(r.view.s[0] + token * tokens + TAIL) * kvleaf_dtype_size(dtype);
    r.host = random_bytes(r.bytes);
    return r;
}

static size_t rows_index(const rows *r, int32_t token, int32_t head, int32_t dim)
{
    return (size_t)(r->view.s[0] + token * r->view.s[1] + head * r->view.s[2] + dim);
}

/* Random values among them the edges of the 16-bit types: ties, largest, overflow, subnormals, infinities, NaN. */
static float source_value(void)
{
    static const float edges[] = {0.0f,           -0.0f,       65504.0f,       65519.996f,     65520.0f,
                                  -65536.0f,      1.0e30f,     3.4028235e38f,  1.00048828f,    1.00146484f,
                                  1.00390625f,    1.01171875f, 6.10351562e-5f, 5.96046448e-8f, 2.98023224e-8f,
                                  2.98023259e-8f, 1.0e-40f,    INFINITY,       -INFINITY,      NAN};
    if (support_next(&rng) % 8 == 0)
        return edges[random_below(COUNT(edges))];
    return support_float(&rng) * 8.0f;
}

static void fill_source(const geometry *g, rows *r, int32_t tokens)
{
    for (int32_t t = 0; t < tokens; t++)
        for (int32_t h = 0; h < g->num_kv_heads; h++)
            for (int32_t d = 0; d < g->head_dim; d++)
                reference_store(r->dtype, r->host, rows_index(r, t, h, d), source_value());
    r->buffer = make_buffer(r->bytes, r->host);
}

/* Each slot at most once: runs as prompts have them, beginning anywhere, single slots, and slots that write nothing. */
static int32_t make_slots(const geometry *g, int64_t *slots, int32_t most)
{
    int32_t total = g->num_blocks * g->block_size, count = 0;
    unsigned char *taken = allocate((size_t)total);
    while (count < most) {
        int32_t run = random_below(3) ? 1 + random_below(40) : 1;
        int64_t slot = random_below(total);
        if (random_below(4) == 0) {
            static const int64_t skipped[] = {-1, INT64_MIN, INT64_MAX, -16};
            slots[count++] = random_below(5) ? skipped[random_below(4)] : total;
            continue;
        }
        for (; run > 0 && count < most && slot < total && !taken[slot]; run--) {
            taken[slot] = 1;
            slots[count++] = slot++;
        }
        if (random_below(50) == 0) /* a full pool has no slot left to find */
            break;
    }
    free(taken);
    return count;
}

/* What the kernel must have written, into side->host; bits of a NaN are free, so the buffer's are taken over. */
static void expect_append(const geometry *g, pool_side *side, const rows *source, const int64_t *slots, int32_t tokens)
{
    size_t size = kvleaf_dtype_size(g->kv_dtype);
    unsigned char *now = read_buffer(side->buffer, side->bytes);
    for (int32_t t = 0; t < tokens; t++) {
        if (slots[t] < 0 || slots[t] >= (int64_t)g->num_blocks * g->block_size)
            continue;
        for (int32_t h = 0; h < g->num_kv_heads; h++)
            for (int32_t d = 0; d < g->head_dim; d++) {
                size_t at = side_index(g, side, slots[t] / g->block_size, (int32_t)(slots[t] % g->block_size), h, d);
                float x = reference_load(source->dtype, source->host, rows_index(source, t, h, d));
                reference_store(g->kv_dtype, side->host, at, x);
                if (isnan(x) && isnan(reference_load(g->kv_dtype, now, at)))
                    memcpy(side->host + at * size, now + at * size, size);
            }
        for (int32_t i = 0; g->place == PACKED_SWIZZLE8 && i < g->num_kv_heads * 64; i++) {
            int32_t d = g->head_dim + i % 64; /* its padding takes part in matrix products: zeros */
            if (d < (g->head_dim + 63) / 64 * 64)
                memset(side->host + size * side_index(g, side, slots[t] / g->block_size,
                                                      (int32_t)(slots[t] % g->block_size), i / 64, d),
                       0, size);
        }
    }
    free(now);
}

static void finish_side(pool_side *side)
{
    check_buffer(side->buffer, side->bytes, side->host, side->value ? "V of the pool" : "K of the pool");
    free(side->host);
}

static void finish_rows(rows *r, const char *name)
{
    check_buffer(r->buffer, r->bytes, r->host, name);
    free(r->host);
}

static void run_append(const geometry *g, int32_t most)
{
    print_geometry(g, "append");
    int32_t slots_offset = 2 * random_below(5);
    cl_int *meta = random_bytes(META_INTS * sizeof *meta);
    int64_t *slots = (int64_t *)(void *)(meta + slots_offset);
    int32_t tokens = make_slots(g, slots, most);
    pool_side k = make_side(g, false), v = make_side(g, true);
    rows k_source = make_rows(g, g->source_dtype, tokens);
    rows v_source = make_rows(g, g->source_dtype, tokens);
    fill_source(g, &k_source, tokens);
    fill_source(g, &v_source, tokens);
    cl_mem meta_buffer = make_buffer(META_INTS * sizeof *meta, meta);
    cl_int4 shape = geometry_shape(g), work = {{slots_offset, tokens, g->num_blocks, 0}};
    const kvl_arg args[] = {
        KVL_ARG(k_source.buffer), KVL_ARG(k_source.view), KVL_ARG(v_source.buffer),
        KVL_ARG(v_source.view),   KVL_ARG(k.buffer),      KVL_ARG(k.view),
        KVL_ARG(v.buffer),        KVL_ARG(v.view),        KVL_ARG(meta_buffer),
        KVL_ARG(shape),           KVL_ARG(work),
    };
    launch_rows(g, geometry_kernel(g, KVL_APPEND), args, COUNT(args), tokens);
    expect_append(g, &k, &k_source, slots, tokens);
    expect_append(g, &v, &v_source, slots, tokens);
    finish_side(&k);
    finish_side(&v);
    finish_rows(&k_source, "k source");
    finish_rows(&v_source, "v source");
    clReleaseMemObject(meta_buffer);
    free(meta);
}

static void test_append(void **state)
{
    (void)state;
    for (int cpu = 0; cpu < 2; cpu++)
        for (int place = 0; place < placements(cpu); place++)
            for (int dtype = KVLEAF_F16; dtype <= KVLEAF_F32; dtype++)
                for (int source = KVLEAF_F16; source <= KVLEAF_F32 && is_paired(KVL_APPEND, cpu, place, dtype);
                     source++) {
                    geometry g = random_geometry(cpu, (placement)place, (kvleaf_dtype)dtype);
                    g.source_dtype = (kvleaf_dtype)source;
                    run_append(&g, 1 + random_below(150));
                }
}

/* A work-group smaller than the usual one, as a device with low limits gets it: both loops that it goes round. */
static void test_small_work_group(void **state)
{
    (void)state;
    static const placement places[] = {NHD, PACKED_SWIZZLE8};
    for (int i = 0; i < 2; i++) {
        geometry g = random_geometry(false, places[i], paired_dtype(KVL_APPEND, false, (int)places[i]));
        g.work_group = 4;
        run_append(&g, 50);
    }
}

/* vllm #50427: block ids around byte and element 2^31 and far beyond, without the memory for them: the view's offset is
 * as far below zero as the blocks are above it. */
static void test_append_far_blocks(void **state)
{
    (void)state;
    static const int64_t firsts[] = {32766, 65534, 131070, INT32_MAX - 4};
    for (int cpu = 0; cpu < 2; cpu++)
        for (int place = 0; place < placements(cpu); place++)
            for (int f = 0; f < COUNT(firsts); f++) {
                kvleaf_dtype dtype = paired_dtype(KVL_APPEND, cpu, place);
                geometry g = {cpu, cpu ? 1 : 64, (placement)place, dtype, KVLEAF_F32, 8, 128, 16, 4};
                pool_side k = make_side(&g, false), v = make_side(&g, true);
                int32_t tokens = 2 * g.block_size;
                rows source = make_rows(&g, g.source_dtype, tokens);
                fill_source(&g, &source, tokens);
                int64_t far[64], near[64];
                for (int32_t t = 0; t < tokens; t++) {
                    near[t] = g.block_size + t; /* blocks 1 and 2 of the buffer */
                    far[t] = near[t] + firsts[f] * g.block_size;
                }
                cl_mem meta = make_buffer(sizeof far, far);
                cl_int4 shape = geometry_shape(&g), work = {{0, tokens, (int32_t)firsts[f] + 4, 0}};
                cl_long4 k_view = k.view, v_view = v.view;
                k_view.s[0] -= firsts[f] * k_view.s[1];
                v_view.s[0] -= firsts[f] * v_view.s[1];
                const kvl_arg args[] = {
                    KVL_ARG(source.buffer), KVL_ARG(source.view), KVL_ARG(source.buffer), KVL_ARG(source.view),
                    KVL_ARG(k.buffer),      KVL_ARG(k_view),      KVL_ARG(v.buffer),      KVL_ARG(v_view),
                    KVL_ARG(meta),          KVL_ARG(shape),       KVL_ARG(work),
                };
                launch_rows(&g, geometry_kernel(&g, KVL_APPEND), args, COUNT(args), tokens);
                expect_append(&g, &k, &source, near, tokens);
                expect_append(&g, &v, &source, near, tokens);
                finish_side(&k);
                finish_side(&v);
                finish_rows(&source, "source");
                clReleaseMemObject(meta);
            }
}

enum { GATHER_SEQS = 11, GATHER_COLUMNS = 170 };
static const int32_t gather_lens[GATHER_SEQS] = {0, 0, 1, 15, 16, 0, 17, 33, 64, 100, 0};

/* Sequences at meta[offset], their rows one after the other; returns how many. Table entries behind a length are wild.
 */
static int32_t make_gather(const geometry *g, cl_int *meta, int32_t offset, cl_int *table)
{
    static const int32_t wild[] = {-1, INT32_MAX, INT32_MIN};
    int32_t total = 0;
    for (int32_t s = 0; s < GATHER_SEQS; s++) {
        cl_int *entry = meta + offset + s * 4; /* GATHER_INTS */
        entry[0] = gather_lens[s];
        entry[1] = s * GATHER_COLUMNS + 3;
        entry[2] = total;
        total += gather_lens[s];
        int32_t needed = (gather_lens[s] + g->block_size - 1) / g->block_size;
        for (int32_t c = 0; c < GATHER_COLUMNS; c++)
            table[entry[1] + c] = c < needed ? random_below(g->num_blocks) : wild[c % 3];
        if (s == 8) /* ids outside the pool: rows of zeros */
            table[entry[1] + needed - 1] = random_below(2) ? g->num_blocks : -1;
    }
    return total;
}

static void expect_gather(const geometry *g, const pool_side *side, rows *out, const cl_int *sequences,
                          const cl_int *table)
{
    size_t size = kvleaf_dtype_size(g->kv_dtype);
    for (int32_t s = 0; s < GATHER_SEQS; s++)
        for (int32_t t = 0; t < gather_lens[s]; t++)
            for (int32_t h = 0; h < g->num_kv_heads; h++)
                for (int32_t d = 0; d < g->head_dim; d++) {
                    int32_t block = table[sequences[4 * s + 1] + t / g->block_size];
                    unsigned char *to = out->host + rows_index(out, sequences[4 * s + 2] + t, h, d) * size;
                    if (block < 0 || block >= g->num_blocks)
                        memset(to, 0, size);
                    else
                        memcpy(to, side->host + side_index(g, side, block, t % g->block_size, h, d) * size, size);
                }
}

static void run_gather(const geometry *g)
{
    print_geometry(g, "gather");
    int32_t offset = random_below(7);
    cl_int *meta = random_bytes(META_INTS * sizeof *meta);
    cl_int *table = random_bytes((GATHER_SEQS * GATHER_COLUMNS + 3) * sizeof *table);
    int32_t total = make_gather(g, meta, offset, table);
    pool_side k = make_side(g, false), v = make_side(g, true);
    rows k_out = make_rows(g, g->kv_dtype, total), v_out = make_rows(g, g->kv_dtype, total);
    k_out.buffer = make_buffer(k_out.bytes, k_out.host);
    v_out.buffer = make_buffer(v_out.bytes, v_out.host);
    cl_mem meta_buffer = make_buffer(META_INTS * sizeof *meta, meta);
    cl_mem table_buffer = make_buffer((GATHER_SEQS * GATHER_COLUMNS + 3) * sizeof *table, table);
    cl_int4 shape = geometry_shape(g), work = {{offset, GATHER_SEQS, g->num_blocks, total}};
    const kvl_arg args[] = {
        KVL_ARG(k.buffer),     KVL_ARG(k.view),      KVL_ARG(v.buffer),     KVL_ARG(v.view),
        KVL_ARG(table_buffer), KVL_ARG(meta_buffer), KVL_ARG(k_out.buffer), KVL_ARG(k_out.view),
        KVL_ARG(v_out.buffer), KVL_ARG(v_out.view),  KVL_ARG(shape),        KVL_ARG(work),
    };
    launch_rows(g, geometry_kernel(g, KVL_GATHER), args, COUNT(args), total);
    expect_gather(g, &k, &k_out, meta + offset, table);
    expect_gather(g, &v, &v_out, meta + offset, table);
    finish_rows(&k_out, "gathered k");
    finish_rows(&v_out, "gathered v");
    finish_side(&k);
    finish_side(&v);
    clReleaseMemObject(meta_buffer);
    clReleaseMemObject(table_buffer);
    free(meta);
    free(table);
}

static void test_gather(void **state)
{
    (void)state;
    for (int cpu = 0; cpu < 2; cpu++)
        for (int place = 0; place < placements(cpu); place++)
            for (int dtype = KVLEAF_F16; dtype <= KVLEAF_F32; dtype++)
                for (int round = 0; round < 2 && is_paired(KVL_GATHER, cpu, place, dtype); round++) {
                    geometry g = random_geometry(cpu, (placement)place, (kvleaf_dtype)dtype);
                    run_gather(&g);
                }
}

static void test_table_update(void **state)
{
    (void)state;
    enum { ENTRIES = 300, UPDATES = 131, OFFSET = 3 };
    cl_int *table = random_bytes(ENTRIES * sizeof *table), *meta = random_bytes(META_INTS * sizeof *meta);
    cl_mem table_buffer = make_buffer(ENTRIES * sizeof *table, table);
    for (int i = 0; i < UPDATES; i++) {
        meta[OFFSET + 2 * i] = i * 2 + 1;
        meta[OFFSET + 2 * i + 1] = random_below(INT32_MAX) - 1;
        table[i * 2 + 1] = meta[OFFSET + 2 * i + 1];
    }
    cl_mem meta_buffer = make_buffer(META_INTS * sizeof *meta, meta);
    cl_int4 work = {{OFFSET, UPDATES, 0, 0}};
    const kvl_arg args[] = {KVL_ARG(table_buffer), KVL_ARG(meta_buffer), KVL_ARG(work)};
    cl_kernel kernel = make_kernel("portable/table.cl", "kvl_table_update", "-cl-std=CL1.2 -DWORK_GROUP=64");
    launch(kernel, args, COUNT(args), 192, 1, 64);
    clReleaseKernel(kernel);
    check_buffer(table_buffer, ENTRIES * sizeof *table, table, "table");
    clReleaseMemObject(meta_buffer);
    free(table);
    free(meta);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_append),
        cmocka_unit_test(test_small_work_group),
        cmocka_unit_test(test_append_far_blocks),
        cmocka_unit_test(test_gather),
        cmocka_unit_test(test_table_update),
    };
    return cmocka_run_group_tests_name("memory kernels", tests, open_device, close_device);
}
