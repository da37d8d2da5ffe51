/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the error paths of the caller-level API: each wrong argument has its own status and its name in the last
 * error, writes nothing, and leaves the object fit for the next right call. */
#include "support.h"

#include <limits.h>
#include <math.h>
#include <string.h>

#include "problem.h"

enum { MAX_SEQS = 4, MAX_TOKENS = 32, MAX_CONTEXT = 128 };

static const problem_geometry geometry = {.q_dtype = KVLEAF_F32,
                                          .kv_dtype = KVLEAF_F32,
                                          .out_dtype = KVLEAF_F32,
                                          .view = PROBLEM_NHD,
                                          .num_heads = 4,
                                          .num_kv_heads = 2,
                                          .head_dim = 16,
                                          .block_size = 16};
static const problem_seq seqs[] = {{.id = 1, .q_len = 3, .kv_len = 33}, {.id = 2, .q_len = 1, .kv_len = 22}};
static const problem_options options = {.seed = 5, .placement = 6};

static kvleaf_device *device, *other_device;
static cl_command_queue queue, other_queue;
static kvleaf_attention *attention;
static problem made;

static int set_up(void **state)
{
    (void)state;
    device = support_device();
    queue = support_queue(device);
    other_device = support_device();
    other_queue = support_queue(other_device);
    kvleaf_attention_params params = problem_attention_params(&geometry, MAX_SEQS, MAX_TOKENS, MAX_CONTEXT);
    ASSERT_OK(kvleaf_attention_create(device, &params, &attention));
    assert_true(problem_create(&made, device, queue, &geometry, seqs, 2, &options));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    problem_destroy(&made);
    kvleaf_attention_destroy(&attention);
    assert_null(attention);
    kvleaf_attention_destroy(&attention);
    clReleaseCommandQueue(queue);
    clReleaseCommandQueue(other_queue);
    kvleaf_device_destroy(&device);
    kvleaf_device_destroy(&other_device);
    return 0;
}

/* The object still does its work, after whatever came before. */
static void assert_still_right(void)
{
    problem_report report;
    ASSERT_OK(problem_attend(&made, attention));
    if (!problem_verify(&made, &report))
        fail_msg("%s", report.text);
}

#define FIELD(name) offsetof(kvleaf_attention_params, name)

static const struct {
    kvleaf_status status;
    const char *named;
    size_t field;
    int32_t value;
    size_t second;
    int32_t second_value;
} create_cases[] = {
    {KVLEAF_INVALID, "struct_size", FIELD(struct_size), 7, 0, 0},
    {KVLEAF_INVALID, "num_heads", FIELD(num_heads), 33, 0, 0},
    {KVLEAF_INVALID, "num_heads", FIELD(num_heads), 3, 0, 0},
    {KVLEAF_INVALID, "num_heads", FIELD(num_heads), 0, 0, 0},
    {KVLEAF_INVALID, "num_heads", FIELD(num_heads), -4, 0, 0},
    {KVLEAF_INVALID, "num_heads", FIELD(num_heads), 1, 0, 0},
    {KVLEAF_INVALID, "num_kv_heads", FIELD(num_kv_heads), 0, 0, 0},
    {KVLEAF_INVALID, "num_kv_heads", FIELD(num_kv_heads), -1, 0, 0},
    {KVLEAF_INVALID, "head_dim_k", FIELD(head_dim_k), 0, 0, 0},
    {KVLEAF_INVALID, "head_dim_k", FIELD(head_dim_k), 257, 0, 0},
    {KVLEAF_INVALID, "head_dim_k", FIELD(head_dim_k), -8, 0, 0},
    {KVLEAF_UNSUPPORTED, "head_dim_v", FIELD(head_dim_v), 8, 0, 0},
    {KVLEAF_INVALID, "q_dtype", FIELD(q_dtype), 3, 0, 0},
    {KVLEAF_INVALID, "kv_dtype", FIELD(kv_dtype), 9, 0, 0},
    {KVLEAF_INVALID, "out_dtype", FIELD(out_dtype), -1, 0, 0},
    {KVLEAF_INVALID, "layout", FIELD(layout), 99, 0, 0},
    {KVLEAF_INVALID, "layout", FIELD(layout), KVLEAF_LAYOUT_ROWS, FIELD(block_size), 0},
    {KVLEAF_INVALID, "block_size", FIELD(block_size), 257, 0, 0},
    {KVLEAF_INVALID, "block_size", FIELD(block_size), -1, 0, 0},
    {KVLEAF_INVALID, "block_size", FIELD(block_size), 8, FIELD(layout), KVLEAF_LAYOUT_CPU16},
    {KVLEAF_INVALID, "block_size", FIELD(block_size), 4, FIELD(layout), KVLEAF_LAYOUT_DIM8},
    {KVLEAF_INVALID, "max_seqs", FIELD(max_seqs), -1, 0, 0},
    {KVLEAF_INVALID, "max_tokens", FIELD(max_tokens), -1, 0, 0},
    {KVLEAF_INVALID, "max_context", FIELD(max_context), -1, 0, 0},
    {KVLEAF_INVALID, "steps_in_flight", FIELD(steps_in_flight), -1, 0, 0},
    {KVLEAF_INVALID, "device_tables", FIELD(device_tables), 2, 0, 0},
    {KVLEAF_INVALID, "sharing", FIELD(sharing), -1, 0, 0},
    {KVLEAF_INVALID, "sharing", FIELD(sharing), KVLEAF_SHARING_ALWAYS + 1, 0, 0},
    {KVLEAF_INVALID, "window", FIELD(window), -1, 0, 0},
    {KVLEAF_INVALID, "window", FIELD(window), INT_MAX, 0, 0},
};

static void test_create_refuses(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(create_cases) / sizeof(create_cases[0]); i++) {
        kvleaf_attention_params params = problem_attention_params(&geometry, MAX_SEQS, MAX_TOKENS, MAX_CONTEXT);
        kvleaf_attention *out = NULL;
        uint64_t bytes = 77;
        memcpy((char *)&params + create_cases[i].field, &create_cases[i].value, sizeof(int32_t));
        if (create_cases[i].second)
            memcpy((char *)&params + create_cases[i].second, &create_cases[i].second_value, sizeof(int32_t));
        print_message("case %zu: %s\n", i, create_cases[i].named);
        ASSERT_FAILS(create_cases[i].status, create_cases[i].named, kvleaf_attention_create(device, &params, &out));
        assert_null(out);
        ASSERT_FAILS(create_cases[i].status, create_cases[i].named,
                     kvleaf_attention_size(device, &params, &bytes, &bytes));
        assert_int_equal(bytes, 77);
    }
}

static void test_create_refuses_floats_and_nulls(void **state)
{
    const float scales[] = {-0.5f, NAN, INFINITY, -INFINITY}, sinks[] = {0, 0, 0, 0};
    kvleaf_attention *out = NULL;
    uint64_t bytes;
    (void)state;
    for (size_t i = 0; i < sizeof(scales) / sizeof(scales[0]); i++) {
        kvleaf_attention_params params = problem_attention_params(&geometry, MAX_SEQS, MAX_TOKENS, MAX_CONTEXT);
        params.softmax_scale = scales[i];
        ASSERT_FAILS(KVLEAF_INVALID, "softmax_scale", kvleaf_attention_create(device, &params, &out));
        params.softmax_scale = 0;
        params.softcap = scales[i];
        ASSERT_FAILS(KVLEAF_INVALID, "softcap", kvleaf_attention_create(device, &params, &out));
    }
    kvleaf_attention_params params = problem_attention_params(&geometry, MAX_SEQS, MAX_TOKENS, MAX_CONTEXT);
    params.sinks = sinks;
    ASSERT_FAILS(KVLEAF_UNSUPPORTED, "sinks", kvleaf_attention_create(device, &params, &out));
    params.sinks = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "device", kvleaf_attention_create(NULL, &params, &out));
    ASSERT_FAILS(KVLEAF_INVALID, "params", kvleaf_attention_create(device, NULL, &out));
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_attention_create(device, &params, NULL));
    ASSERT_FAILS(KVLEAF_INVALID, "device_bytes", kvleaf_attention_size(device, &params, NULL, &bytes));
    assert_null(out);
    kvleaf_attention_destroy(NULL);
}

static void test_size_is_said_and_variants_are_named(void **state)
{
    static const char *const operations[] = {"append", "decode", "prefill", "gather", "merge"};
    kvleaf_attention_params params = problem_attention_params(&geometry, MAX_SEQS, MAX_TOKENS, MAX_CONTEXT);
    uint64_t device_bytes = 0, host_bytes = 0, more = 0;
    (void)state;
    ASSERT_OK(kvleaf_attention_size(device, &params, &device_bytes, &host_bytes));
    assert_true(device_bytes > 0 && host_bytes > 0);
    params.max_context *= 16;
    ASSERT_OK(kvleaf_attention_size(device, &params, &more, &host_bytes));
    assert_true(more > device_bytes);
    for (size_t i = 0; i < sizeof(operations) / sizeof(operations[0]); i++)
        assert_int_equal(
            strncmp(kvleaf_attention_variant(attention, operations[i]), operations[i], strlen(operations[i])), 0);
    assert_string_equal(kvleaf_attention_variant(attention, "none"), "");
    assert_string_equal(kvleaf_attention_variant(attention, NULL), "");
    assert_string_equal(kvleaf_attention_variant(NULL, "decode"), "");
}

/* Tables and workspace are one buffer, of the size that is said: a device whose largest is a byte less refuses. */
static void test_the_largest_buffer(void **state)
{
    kvleaf_attention_params params = problem_attention_params(&geometry, MAX_SEQS, MAX_TOKENS, MAX_CONTEXT);
    uint64_t device_bytes = 0, host_bytes = 0;
    (void)state;
    ASSERT_OK(kvleaf_attention_size(device, &params, &device_bytes, &host_bytes));
    for (uint64_t lacking = 0; lacking < 2; lacking++) {
        kvleaf_device_params limited_params = support_params();
        kvleaf_device *limited = NULL;
        kvleaf_attention *out = NULL;
        limited_params.max_alloc_bytes = device_bytes - lacking;
        ASSERT_OK(support_create(&limited_params, &limited));
        kvleaf_status status = kvleaf_attention_create(limited, &params, &out);
        if (lacking) {
            assert_int_equal(status, KVLEAF_UNSUPPORTED);
            assert_non_null(strstr(kvleaf_last_error()->message, "max_decode_keys"));
            assert_int_equal(kvleaf_last_error()->value, device_bytes);
            assert_int_equal(kvleaf_last_error()->limit, device_bytes - 1);
            assert_null(out);
        } else {
            assert_int_equal(status, KVLEAF_OK);
        }
        kvleaf_attention_destroy(&out);
        kvleaf_device_destroy(&limited);
    }
}

/* Before any plan there is no step. */
static void test_attend_needs_a_plan(void **state)
{
    kvleaf_attention_params params = problem_attention_params(&geometry, MAX_SEQS, MAX_TOKENS, MAX_CONTEXT);
    kvleaf_attention *fresh = NULL;
    kvleaf_exec exec = problem_exec(&made);
    kvleaf_kv_view view = problem_kv_view(&made);
    kvleaf_tensor q = problem_tensor(&made.q), out = problem_tensor(&made.out);
    (void)state;
    ASSERT_OK(kvleaf_attention_create(device, &params, &fresh));
    assert_true(problem_upload_outputs(&made));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_attention_attend(fresh, &q, &view, &out, NULL, &exec));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_attention_append(fresh, &q, &q, &view, &exec));
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_attention_gather(fresh, &view, &out, &out, &exec));
    assert_true(problem_untouched(&made));
    kvleaf_attention_destroy(&fresh);
}

static void refuse_plan(kvleaf_status status, const char *named, const kvleaf_batch *batch)
{
    kvleaf_exec exec = problem_exec(&made);
    ASSERT_FAILS(status, named, kvleaf_attention_plan(attention, batch, &exec));
}

static void test_plan_refuses_lengths(void **state)
{
    const int32_t starts_at_1[] = {1, 3, 4}, falls[] = {0, 3, 2}, many[] = {0, 30, 33}, fine[] = {0, 3, 4};
    const int32_t negative[] = {33, -1}, too_long[] = {129, 22}, beyond_table[] = {33, 97};
    const int32_t seven[] = {0, 1, 2, 3, 4, 5};
    const kvleaf_batch right = problem_batch(&made);
    kvleaf_batch batch = right;
    (void)state;
    assert_true(beyond_table[1] > made.columns * geometry.block_size);
    batch.struct_size = 3;
    refuse_plan(KVLEAF_INVALID, "struct_size", &batch);
    refuse_plan(KVLEAF_INVALID, "batch", NULL);
    batch = right;
    batch.num_seqs = -1;
    refuse_plan(KVLEAF_INVALID, "num_seqs", &batch);
    batch.num_seqs = 5;
    batch.cu_seqlens_q = seven;
    refuse_plan(KVLEAF_TOO_SMALL, "max_seqs", &batch);
    batch = right;
    batch.cu_seqlens_q = NULL;
    refuse_plan(KVLEAF_INVALID, "cu_seqlens_q", &batch);
    batch.cu_seqlens_q = starts_at_1;
    refuse_plan(KVLEAF_INVALID, "cu_seqlens_q", &batch);
    batch.cu_seqlens_q = falls;
    refuse_plan(KVLEAF_INVALID, "cu_seqlens_q", &batch);
    batch.cu_seqlens_q = many;
    refuse_plan(KVLEAF_TOO_SMALL, "max_tokens", &batch);
    batch.cu_seqlens_q = fine;
    batch.seq_lens_k = NULL;
    refuse_plan(KVLEAF_INVALID, "seq_lens_k", &batch);
    batch.seq_lens_k = negative;
    refuse_plan(KVLEAF_INVALID, "seq_lens_k", &batch);
    batch.seq_lens_k = too_long;
    refuse_plan(KVLEAF_TOO_SMALL, "max_context", &batch);
    batch.seq_lens_k = beyond_table;
    refuse_plan(KVLEAF_INVALID, "block_table_stride", &batch);
    assert_still_right();
}

static void test_plan_refuses_ids_and_choices(void **state)
{
    const kvleaf_batch right = problem_batch(&made);
    const int64_t bad_slots[] = {0, 1, 2, (int64_t)made.num_blocks * geometry.block_size};
    const kvleaf_family families[] = {KVLEAF_FAMILY_AUTO, (kvleaf_family)3};
    const kvleaf_mask masks[] = {KVLEAF_MASK_CAUSAL, (kvleaf_mask)2};
    const int32_t ids[] = {-1, INT_MIN, INT_MAX, made.num_blocks, made.num_blocks + 1};
    int32_t table[16];
    kvleaf_batch batch = right;
    (void)state;
    assert_true(2 * made.columns <= 16);
    batch.block_table = NULL;
    refuse_plan(KVLEAF_INVALID, "block_table", &batch);
    batch.block_table = table;
    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
        memcpy(table, made.table, (size_t)(2 * made.columns) * sizeof(*table));
        table[made.columns + 1] = ids[i]; /* of sequence 1, which reaches into two blocks */
        refuse_plan(KVLEAF_INVALID, "block_table", &batch);
        assert_int_equal(kvleaf_last_error()->value, ids[i]);
        assert_int_equal(kvleaf_last_error()->limit, made.num_blocks - 1);
    }
    batch = right;
    batch.num_blocks = 0;
    refuse_plan(KVLEAF_INVALID, "num_blocks", &batch);
    batch = right;
    batch.slot_mapping = bad_slots;
    refuse_plan(KVLEAF_INVALID, "slot_mapping", &batch);
    batch = right;
    batch.families = families;
    refuse_plan(KVLEAF_INVALID, "families", &batch);
    batch = right;
    batch.masks = masks;
    refuse_plan(KVLEAF_INVALID, "masks", &batch);
    batch = right;
    batch.device_block_table = made.q.buffer;
    refuse_plan(KVLEAF_INVALID, "device_tables", &batch);
    assert_still_right();
}

static void test_plan_refuses_places(void **state)
{
    const kvleaf_batch batch = problem_batch(&made);
    kvleaf_exec exec = problem_exec(&made);
    (void)state;
    ASSERT_FAILS(KVLEAF_INVALID, "attention", kvleaf_attention_plan(NULL, &batch, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "exec", kvleaf_attention_plan(attention, &batch, NULL));
    exec.queue = other_queue;
    ASSERT_STATUS(KVLEAF_FOREIGN, kvleaf_attention_plan(attention, &batch, &exec));
    exec.queue = NULL;
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_attention_plan(attention, &batch, &exec));
    exec = problem_exec(&made);
    exec.struct_size = 1;
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size", kvleaf_attention_plan(attention, &batch, &exec));
    exec = problem_exec(&made);
    exec.num_wait = 1;
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_attention_plan(attention, &batch, &exec));
    assert_still_right();
}

typedef struct attend_arguments {
    kvleaf_tensor q, out, lse;
    kvleaf_kv_view view;
} attend_arguments;

static cl_mem foreign, tiny;

static void change_attend(int which, attend_arguments *a)
{
    kvleaf_tensor *all[] = {&a->q, &a->out, &a->lse, &a->view.k, &a->view.v};
    if (which < 5) {
        all[which]->handle = NULL;
    } else if (which < 10) {
        all[which - 5]->handle = foreign;
    } else if (which < 15) {
        all[which - 10]->handle = tiny;
        all[which - 10]->offset = 0;
    } else if (which < 20) {
        all[which - 15]->offset += 2; /* half an element */
    } else if (which < 25) {
        all[which - 20]->dtype = KVLEAF_F16;
        all[which - 20]->offset = 0;
    } else if (which < 30) {
        all[which - 25]->dtype = (kvleaf_dtype)7;
    } else if (which < 35) {
        all[which - 30]->memory = (kvleaf_memory)1;
    } else if (which < 40) {
        all[which - 35]->token_stride = -8;
    } else if (which < 45) {
        all[which - 40]->token_stride = INT64_MAX / 4;
    } else if (which < 50) {
        all[which - 45]->offset = UINT64_MAX / 8 * 4;
    }
}

static const char *const attend_names[] = {"q", "out", "lse", "view.k", "view.v"};
static const kvleaf_status attend_statuses[] = {
    KVLEAF_INVALID,     /* no handle */
    KVLEAF_FOREIGN,     /* a buffer of another context */
    KVLEAF_TOO_SMALL,   /* a buffer that ends too soon */
    KVLEAF_INVALID,     /* an offset between elements */
    KVLEAF_INVALID,     /* another dtype than the object's */
    KVLEAF_INVALID,     /* no dtype */
    KVLEAF_UNSUPPORTED, /* SVM */
    KVLEAF_INVALID,     /* a negative stride */
    KVLEAF_TOO_SMALL,   /* a stride far out of the buffer */
    KVLEAF_TOO_SMALL,   /* an offset far out of it */
};

static void test_attend_refuses_tensors(void **state)
{
    const kvleaf_batch batch = problem_batch(&made);
    kvleaf_exec exec = problem_exec(&made);
    const attend_arguments right = {problem_tensor(&made.q), problem_tensor(&made.out), problem_tensor(&made.lse),
                                    problem_kv_view(&made)};
    (void)state;
    foreign = support_buffer(other_device, other_queue, made.k.bytes, 0);
    tiny = support_buffer(device, queue, 32, 0);
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
    assert_true(problem_upload_outputs(&made));
    for (int i = 0; i < 50; i++) {
        attend_arguments given = right;
        change_attend(i, &given);
        print_message("case %d: %s\n", i, attend_names[i % 5]);
        kvleaf_status status = kvleaf_attention_attend(attention, &given.q, &given.view, &given.out, &given.lse, &exec);
        if (i / 5 >= 8) /* INVALID too where it overflows */
            assert_true(status == KVLEAF_TOO_SMALL || status == KVLEAF_INVALID);
        else
            ASSERT_STATUS(attend_statuses[i / 5], status);
        support_assert_field(attend_names[i % 5], __FILE__, __LINE__);
        assert_true(problem_untouched(&made));
    }
    clReleaseMemObject(foreign);
    clReleaseMemObject(tiny);
    assert_still_right();
}

static void test_attend_refuses_views_and_nulls(void **state)
{
    const kvleaf_batch batch = problem_batch(&made);
    kvleaf_exec exec = problem_exec(&made);
    attend_arguments a = {problem_tensor(&made.q), problem_tensor(&made.out), problem_tensor(&made.lse),
                          problem_kv_view(&made)};
    (void)state;
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
    assert_true(problem_upload_outputs(&made));
    ASSERT_FAILS(KVLEAF_INVALID, "q", kvleaf_attention_attend(attention, NULL, &a.view, &a.out, &a.lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "view", kvleaf_attention_attend(attention, &a.q, NULL, &a.out, &a.lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_attention_attend(attention, &a.q, &a.view, NULL, &a.lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "attention", kvleaf_attention_attend(NULL, &a.q, &a.view, &a.out, &a.lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "exec", kvleaf_attention_attend(attention, &a.q, &a.view, &a.out, &a.lse, NULL));
    a.view.struct_size--;
    ASSERT_FAILS(KVLEAF_INVALID, "struct_size",
                 kvleaf_attention_attend(attention, &a.q, &a.view, &a.out, &a.lse, &exec));
    a.view = problem_kv_view(&made);
    a.view.layout = KVLEAF_LAYOUT_CPU16;
    ASSERT_FAILS(KVLEAF_INVALID, "view.layout",
                 kvleaf_attention_attend(attention, &a.q, &a.view, &a.out, &a.lse, &exec));
    a.view = problem_kv_view(&made);
    a.view.num_blocks = made.num_blocks - 1; /* fewer than the step was planned for */
    ASSERT_STATUS(KVLEAF_INVALID, kvleaf_attention_attend(attention, &a.q, &a.view, &a.out, &a.lse, &exec));
    a.view = problem_kv_view(&made);
    a.out.token_stride = 8; /* rows of 4 heads of 16 written over each other */
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_attention_attend(attention, &a.q, &a.view, &a.out, &a.lse, &exec));
    assert_true(problem_untouched(&made));
    assert_still_right();
}

static void test_append_and_gather_refuse(void **state)
{
    kvleaf_batch batch = problem_batch(&made);
    kvleaf_exec exec = problem_exec(&made);
    kvleaf_kv_view view = problem_kv_view(&made);
    kvleaf_tensor out = problem_tensor(&made.out), room = problem_tensor(&made.k), bad = room;
    (void)state;
    ASSERT_OK(kvleaf_attention_plan(attention, &batch, &exec));
    assert_true(problem_upload_outputs(&made));
    ASSERT_FAILS(KVLEAF_INVALID, "k", kvleaf_attention_append(attention, NULL, &out, &view, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "v", kvleaf_attention_append(attention, &out, NULL, &view, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "view", kvleaf_attention_append(attention, &out, &out, NULL, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "view", kvleaf_attention_gather(attention, NULL, &room, &room, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "k", kvleaf_attention_gather(attention, &view, NULL, &room, &exec));
    bad.dtype = KVLEAF_BF16;
    ASSERT_FAILS(KVLEAF_INVALID, "k", kvleaf_attention_gather(attention, &view, &bad, &room, &exec));
    bad = out;
    bad.offset = made.out.bytes;
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "v", kvleaf_attention_append(attention, &out, &bad, &view, &exec));
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "k", kvleaf_attention_gather(attention, &view, &bad, &room, &exec));
    assert_true(problem_untouched(&made));
    assert_still_right();
}

static void test_contiguous_has_no_blocks(void **state)
{
    problem_geometry flat = geometry;
    kvleaf_attention *object = NULL;
    problem other;
    (void)state;
    flat.view = PROBLEM_CONTIGUOUS;
    kvleaf_attention_params params = problem_attention_params(&flat, MAX_SEQS, MAX_TOKENS, MAX_CONTEXT);
    ASSERT_OK(kvleaf_attention_create(device, &params, &object));
    assert_string_equal(kvleaf_attention_variant(object, "append"), "");
    assert_true(problem_create(&other, device, queue, &flat, seqs, 2, &options));
    kvleaf_batch batch = problem_batch(&other), paged = problem_batch(&made);
    kvleaf_exec exec = problem_exec(&other);
    kvleaf_kv_view view = problem_kv_view(&other);
    kvleaf_tensor out = problem_tensor(&other.out);
    ASSERT_FAILS(KVLEAF_INVALID, "block_table", kvleaf_attention_plan(object, &paged, &exec));
    batch.cu_seqlens_k = NULL;
    ASSERT_FAILS(KVLEAF_INVALID, "cu_seqlens_k", kvleaf_attention_plan(object, &batch, &exec));
    ASSERT_OK(problem_attend(&other, object));
    ASSERT_FAILS(KVLEAF_INVALID, "block_size", kvleaf_attention_append(object, &out, &out, &view, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "block_size", kvleaf_attention_gather(object, &view, &out, &out, &exec));
    problem_destroy(&other);
    kvleaf_attention_destroy(&object);
}

static void test_merge_refuses(void **state)
{
    kvleaf_exec exec = problem_exec(&made);
    kvleaf_tensor q = problem_tensor(&made.q), out = problem_tensor(&made.out), lse = problem_tensor(&made.lse);
    kvleaf_tensor half = q, lses = problem_tensor(&made.k);
    (void)state;
    half.dtype = KVLEAF_F16;
    assert_true(problem_upload_outputs(&made));
    ASSERT_FAILS(KVLEAF_INVALID, "n", kvleaf_attention_merge(attention, 0, 1, &q, 0, &lses, 0, &out, &lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "n", kvleaf_attention_merge(attention, -1, 1, &q, 0, &lses, 0, &out, &lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "rows", kvleaf_attention_merge(attention, 1, -1, &q, 0, &lses, 0, &out, &lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "outs", kvleaf_attention_merge(attention, 1, 1, NULL, 0, &lses, 0, &out, &lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "outs",
                 kvleaf_attention_merge(attention, 1, 1, &half, 0, &lses, 0, &out, &lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "outs", kvleaf_attention_merge(attention, 2, 1, &q, -32, &lses, 4, &out, &lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "lses", kvleaf_attention_merge(attention, 1, 1, &q, 0, NULL, 0, &out, &lse, &exec));
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "outs",
                 kvleaf_attention_merge(attention, 3, 1, &q, 1 << 20, &lses, 4, &out, &lse, &exec));
    ASSERT_FAILS(KVLEAF_TOO_SMALL, "out",
                 kvleaf_attention_merge(attention, 1, 8, &lses, 0, &lses, 0, &out, &lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "out", kvleaf_attention_merge(attention, 1, 1, &q, 0, &lses, 0, NULL, &lse, &exec));
    ASSERT_FAILS(KVLEAF_INVALID, "lse", kvleaf_attention_merge(attention, 1, 1, &q, 0, &lses, 0, &out, &half, &exec));
    ASSERT_OK(kvleaf_attention_merge(attention, 1, 0, &q, 0, &lses, 0, &out, &lse, &exec));
    assert_true(problem_untouched(&made));
}

/* Two steps wait for an event that the application holds back; the third finds no staging slot and changes nothing. */
static void test_plan_is_busy_while_steps_are_in_flight(void **state)
{
    kvleaf_attention_params params = problem_attention_params(&geometry, MAX_SEQS, MAX_TOKENS, MAX_CONTEXT);
    kvleaf_attention *object = NULL;
    const kvleaf_batch batch = problem_batch(&made);
    kvleaf_exec exec = problem_exec(&made);
    cl_int error;
    cl_event held = clCreateUserEvent(kvleaf_device_context(device), &error);
    (void)state;
    assert_int_equal(error, CL_SUCCESS);
    params.steps_in_flight = 2;
    ASSERT_OK(kvleaf_attention_create(device, &params, &object));
    exec.num_wait = 1;
    exec.wait_list = &held;
    ASSERT_OK(kvleaf_attention_plan(object, &batch, &exec));
    ASSERT_OK(kvleaf_attention_plan(object, &batch, &exec));
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_attention_plan(object, &batch, &exec));
    ASSERT_STATUS(KVLEAF_BUSY, kvleaf_attention_plan(object, &batch, &exec));
    clSetUserEventStatus(held, CL_COMPLETE);
    clFinish(queue);
    problem_report report;
    ASSERT_OK(problem_attend(&made, object));
    if (!problem_verify(&made, &report))
        fail_msg("%s", report.text);
    clReleaseEvent(held);
    kvleaf_attention_destroy(&object);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create_refuses),
        cmocka_unit_test(test_create_refuses_floats_and_nulls),
        cmocka_unit_test(test_size_is_said_and_variants_are_named),
        cmocka_unit_test(test_the_largest_buffer),
        cmocka_unit_test(test_attend_needs_a_plan),
        cmocka_unit_test(test_plan_refuses_lengths),
        cmocka_unit_test(test_plan_refuses_ids_and_choices),
        cmocka_unit_test(test_plan_refuses_places),
        cmocka_unit_test(test_attend_refuses_tensors),
        cmocka_unit_test(test_attend_refuses_views_and_nulls),
        cmocka_unit_test(test_append_and_gather_refuse),
        cmocka_unit_test(test_contiguous_has_no_blocks),
        cmocka_unit_test(test_merge_refuses),
        cmocka_unit_test(test_plan_is_busy_while_steps_are_in_flight),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
