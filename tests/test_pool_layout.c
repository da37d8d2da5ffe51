/* SPDX-License-Identifier: Apache-2.0 */
/* The layouts of a pool's tiles: one definition in C and one in OpenCL C, the same over every element, each element at
 * a place of its own inside the tile; offsets beyond 32 bits; names and what AUTO becomes. */
#include "moves.h"

#include "attention/variants.h"

static const kvleaf_layout packed[] = {KVLEAF_LAYOUT_ROWS, KVLEAF_LAYOUT_CPU16, KVLEAF_LAYOUT_DIM8,
                                       KVLEAF_LAYOUT_SWIZZLE8};

/* Writes tile_offset of every element of a tile, K first, then V, a work-item a (token, side); and tile_start of fake
 * ids. */
static const char kernel_text[] =
    "__kernel void offsets(__global uint *out, int4 shape)\n"
    "{\n"
    "    int block_size = shape.s0, head_dim = shape.s1;\n"
    "    int token = (int)get_global_id(0), value = (int)get_global_id(1);\n"
    "    for (int dim = 0; dim < head_dim; dim++)\n"
    "        out[(value * block_size + token) * head_dim + dim] =\n"
    "            tile_offset(value, block_size, head_dim, token, dim);\n"
    "}\n"
    "__kernel void starts(__global long *out, __global const int *ids, int count, long4 view, int4 place)\n"
    "{\n"
    "    for (int i = 0; i < count; i++)\n"
    "        out[i] = tile_start(view, ids[2 * i], ids[2 * i + 1])\n"
    "               + element_offset(view, 0, place.s0, place.s1, place.s2, place.s3);\n"
    "}\n";

static cl_program build_twin(kvleaf_layout layout)
{
    kvl_text text = {0};
    ASSERT_OK(kvl_source_expand(device, "common/layout.clh", &text));
    kvl_text_append(&text, kernel_text, sizeof kernel_text - 1);
    assert_false(text.failed);
    const char *source = text.data;
    cl_int error;
    cl_program program = clCreateProgramWithSource(kvleaf_device_context(device), 1, &source, &text.size, &error);
    assert_int_equal(error, CL_SUCCESS);
    char options[64];
    snprintf(options, sizeof options, "-cl-std=CL1.2 -DKV_LAYOUT=%d", (int)layout);
    cl_device_id id = kvleaf_device_id(device);
    assert_int_equal(clBuildProgram(program, 1, &id, options, NULL, NULL), CL_SUCCESS);
    kvl_text_free(&text);
    return program;
}

static const int32_t some_dims[] = {1,  2,  7,  8,  9,   15,  16,  17,  20,  63,  64,
                                    65, 72, 80, 96, 112, 120, 128, 129, 192, 250, 256};

/* Every block size from 1 to 20 and some beyond, with every head_dim of the sample. */
static bool is_sampled(int32_t block_size)
{
    return block_size <= 20 || block_size % 48 == 0 || block_size == 31 || block_size == 33 || block_size >= 255;
}

static void check_tile(kvleaf_layout layout, int32_t block_size, int32_t head_dim, const uint32_t *twin)
{
    static unsigned char used[256 * 256];
    size_t tile = kvleaf_layout_tile(layout, block_size, head_dim);
    assert_in_range(tile, (size_t)block_size * (size_t)head_dim, sizeof used);
    for (int value = 0; value < 2; value++) {
        memset(used, 0, sizeof used);
        for (int32_t token = 0; token < block_size; token++)
            for (int32_t dim = 0; dim < head_dim; dim++) {
                size_t at = kvleaf_layout_offset(layout, value, block_size, head_dim, token, dim);
                if (at >= tile || used[at] || at != *twin)
                    fail_msg("%s %c block_size %d head_dim %d token %d dim %d: offset %zu (OpenCL C: %u), tile %zu%s",
                             kvleaf_layout_name(layout), value ? 'V' : 'K', block_size, head_dim, token, dim, at, *twin,
                             tile, at < tile && used[at] ? ", taken by another" : "");
                used[at] = 1;
                twin++;
            }
    }
}

static void test_twins(void **state)
{
    (void)state;
    size_t bytes = 2 * 256 * 256 * sizeof(uint32_t);
    void *noise = random_bytes(bytes);
    cl_mem buffer = make_buffer(bytes, noise);
    free(noise);
    for (int l = 0; l < COUNT(packed); l++) {
        cl_program program = build_twin(packed[l]);
        cl_int error;
        cl_kernel kernel = clCreateKernel(program, "offsets", &error);
        assert_int_equal(error, CL_SUCCESS);
        int tiles = 0;
        for (int32_t block_size = 1; block_size <= 256; block_size++)
            for (int d = 0; d < COUNT(some_dims) && is_sampled(block_size); d++) {
                if (kvl_layout_refuses(packed[l], block_size))
                    continue;
                cl_int4 shape = {{block_size, some_dims[d], 0, 0}};
                const kvl_arg args[] = {KVL_ARG(buffer), KVL_ARG(shape)};
                launch(kernel, args, COUNT(args), (size_t)block_size, 2, 1);
                size_t count = 2 * (size_t)block_size * (size_t)some_dims[d];
                uint32_t *twin = read_buffer(buffer, count * sizeof *twin);
                check_tile(packed[l], block_size, some_dims[d], twin);
                free(twin);
                tiles++;
            }
        assert_in_range(tiles, 100, 10000);
        clReleaseKernel(kernel);
        clReleaseProgram(program);
    }
    clReleaseMemObject(buffer);
}

/* vllm #50427: block ids around 2^31 bytes and elements of a 16 x 8 x 128 block, and far beyond. */
static void test_offsets_are_64_bit(void **state)
{
    (void)state;
    static const cl_int ids[] = {65535, 0,       65536, 7,         131071, 7,         131072,
                                 3,     1 << 20, 1,     INT32_MAX, 7,      INT32_MAX, 1000000};
    enum { IDS = COUNT(ids) / 2 };
    static const int64_t block_strides[] = {16 * 8 * 128, 256 * 8 * 256, (int64_t)1 << 31};
    cl_mem id_buffer = make_buffer(sizeof ids, ids);
    for (int packed_too = 0; packed_too < 2; packed_too++)
        for (int s = 0; s < COUNT(block_strides); s++) {
            cl_long4 view = {{5, block_strides[s], 3000000000, 2048}};
            cl_int4 place = {{256, 128, 255, 127}};
            cl_program program = build_twin(packed_too ? KVLEAF_LAYOUT_ROWS : KVLEAF_LAYOUT_STRIDED);
            cl_int error, count = IDS;
            cl_kernel kernel = clCreateKernel(program, "starts", &error);
            assert_int_equal(error, CL_SUCCESS);
            int64_t clear[IDS] = {0};
            cl_mem out = make_buffer(sizeof clear, clear);
            const kvl_arg args[] = {KVL_ARG(out), KVL_ARG(id_buffer), KVL_ARG(count), KVL_ARG(view), KVL_ARG(place)};
            launch(kernel, args, COUNT(args), 1, 1, 1);
            int64_t *got = read_buffer(out, sizeof clear);
            int64_t inside = packed_too ? 255 * 128 + 127 : 255 * 3000000000 + 127;
            for (int i = 0; i < IDS; i++)
                assert_int_equal(got[i], 5 + ids[2 * i] * block_strides[s] + (int64_t)ids[2 * i + 1] * 2048 + inside);
            free(got);
            clReleaseMemObject(out);
            clReleaseKernel(kernel);
            clReleaseProgram(program);
        }
    clReleaseMemObject(id_buffer);
}

/* Places worked out by hand from the description in pool.h. */
static void test_known_places(void **state)
{
    (void)state;
    static const struct {
        kvleaf_layout layout;
        bool value;
        int32_t block_size, head_dim, token, dim;
        size_t offset;
    } places[] = {
        {KVLEAF_LAYOUT_ROWS, false, 4, 1, 3, 0, 3},
        {KVLEAF_LAYOUT_ROWS, true, 16, 64, 2, 5, 2 * 64 + 5},
        {KVLEAF_LAYOUT_CPU16, false, 32, 128, 3, 5, 5 * 16 + 3},
        {KVLEAF_LAYOUT_CPU16, false, 32, 128, 19, 5, 16 * 128 + 5 * 16 + 3},
        {KVLEAF_LAYOUT_CPU16, true, 16, 128, 3, 70, 64 * 16 + 3 * 64 + 6},
        {KVLEAF_LAYOUT_CPU16, true, 16, 80, 3, 70, 64 * 16 + 3 * 16 + 6},
        {KVLEAF_LAYOUT_CPU16, true, 32, 72, 17, 71, 16 * 80 + 64 * 16 + 1 * 16 + 7},
        {KVLEAF_LAYOUT_DIM8, false, 16, 128, 3, 13, 1 * 16 * 8 + 3 * 8 + 5},
        {KVLEAF_LAYOUT_DIM8, true, 8, 20, 3, 13, 3 * 24 + 13},
        {KVLEAF_LAYOUT_SWIZZLE8, false, 16, 128, 11, 70, 8 * 128 + 512 + 3 * 64 + (0 ^ 3) * 8 + 6},
        {KVLEAF_LAYOUT_SWIZZLE8, true, 8, 80, 5, 17, 5 * 64 + (2 ^ 5) * 8 + 1},
    };
    for (int i = 0; i < COUNT(places); i++)
        assert_int_equal(kvleaf_layout_offset(places[i].layout, places[i].value, places[i].block_size,
                                              places[i].head_dim, places[i].token, places[i].dim),
                         places[i].offset);
    assert_int_equal(kvleaf_layout_tile(KVLEAF_LAYOUT_ROWS, 4, 1), 4);
    assert_int_equal(kvleaf_layout_tile(KVLEAF_LAYOUT_CPU16, 16, 72), 16 * 80);
    assert_int_equal(kvleaf_layout_tile(KVLEAF_LAYOUT_DIM8, 24, 65), 24 * 72);
}

static void test_names(void **state)
{
    (void)state;
    static const char *const names[] = {"auto", "strided", "rows", "cpu16", "dim8", "swizzle8"};
    for (int i = 0; i < COUNT(names); i++)
        assert_string_equal(kvleaf_layout_name((kvleaf_layout)i), names[i]);
    assert_string_equal(kvleaf_layout_name((kvleaf_layout)99), "?");
    assert_string_equal(kvleaf_layout_name((kvleaf_layout)-1), "?");
}

static void test_best_and_refused(void **state)
{
    (void)state;
    static const struct {
        cl_device_type type;
        int32_t block_size;
        kvleaf_layout layout;
    } best[] = {
        {CL_DEVICE_TYPE_CPU, 16, KVLEAF_LAYOUT_CPU16}, {CL_DEVICE_TYPE_CPU, 256, KVLEAF_LAYOUT_CPU16},
        {CL_DEVICE_TYPE_CPU, 24, KVLEAF_LAYOUT_ROWS},  {CL_DEVICE_TYPE_CPU, 1, KVLEAF_LAYOUT_ROWS},
        {CL_DEVICE_TYPE_GPU, 8, KVLEAF_LAYOUT_DIM8},   {CL_DEVICE_TYPE_GPU, 16, KVLEAF_LAYOUT_DIM8},
        {CL_DEVICE_TYPE_GPU, 12, KVLEAF_LAYOUT_ROWS},  {CL_DEVICE_TYPE_ACCELERATOR, 16, KVLEAF_LAYOUT_ROWS},
    };
    for (int i = 0; i < COUNT(best); i++) {
        kvleaf_device fake = {.caps.type = best[i].type};
        for (int dtype = KVLEAF_F16; dtype <= KVLEAF_F32; dtype++)
            assert_int_equal(kvl_layout_best(&fake, (kvleaf_dtype)dtype, best[i].block_size, 128, 4), best[i].layout);
    }
    assert_int_equal(kvl_layout_best(NULL, KVLEAF_F16, 16, 128, 4), KVLEAF_LAYOUT_ROWS);
    for (int32_t block_size = 1; block_size <= 256; block_size++) {
        assert_null(kvl_layout_refuses(KVLEAF_LAYOUT_ROWS, block_size));
        assert_int_equal(kvl_layout_refuses(KVLEAF_LAYOUT_CPU16, block_size) == NULL, block_size % 16 == 0);
        assert_int_equal(kvl_layout_refuses(KVLEAF_LAYOUT_DIM8, block_size) == NULL, block_size % 8 == 0);
    }
}

/* The decode kernel that the table gives a pool of its device's best layout. */
static const char *decode_of(const kvleaf_device *fake, kvleaf_dtype dtype, int32_t block_size, int32_t head_dim,
                             int32_t group)
{
    const kvl_geometry geometry = {.q_dtype = dtype,
                                   .kv_dtype = dtype,
                                   .out_dtype = dtype,
                                   .layout = kvl_layout_best(fake, dtype, block_size, head_dim, group),
                                   .num_heads = 2 * group,
                                   .num_kv_heads = 2,
                                   .head_dim = head_dim,
                                   .block_size = block_size};
    int count = 0;
    const kvl_variant *rows = kvl_variants(KVL_DECODE, &count), *last = NULL;
    for (int i = 0; i < count; i++) {
        if (!rows[i].refuses(&fake->caps, &geometry) && !(rows[i].undocumented && fake->deny_undocumented))
            last = &rows[i];
    }
    return last ? last->name : "none";
}

/* With tensor cores AUTO is what the decode kernels for them read, whatever the block size. */
static void test_best_with_tensor_cores(void **state)
{
    (void)state;
    static const struct {
        int capability;
        bool denied;
        const char *blocks; /* kernel of block sizes that are multiples of 8 */
    } gpus[] = {{80, false, "nvidia_mma"},
                {89, false, "nvidia_mma"},
                {90, false, "nvidia"},
                {90, true, "nvidia_mma"},
                {120, false, "nvidia_mma"}};
    static const int32_t block_sizes[] = {1, 2, 4, 5, 12, 8, 16, 32, 256};
    for (int i = 0; i < COUNT(gpus); i++) {
        kvleaf_device fake = {.caps.type = CL_DEVICE_TYPE_GPU,
                              .caps.nvidia_capability = gpus[i].capability,
                              .deny_undocumented = gpus[i].denied};
        for (int k = 0; k < COUNT(block_sizes); k++) {
            bool eights = block_sizes[k] % 8 == 0;
            for (int dtype = KVLEAF_F16; dtype <= KVLEAF_BF16; dtype++) {
                assert_int_equal(kvl_layout_best(&fake, (kvleaf_dtype)dtype, block_sizes[k], 128, 4),
                                 eights ? KVLEAF_LAYOUT_SWIZZLE8 : KVLEAF_LAYOUT_ROWS);
                assert_string_equal(decode_of(&fake, (kvleaf_dtype)dtype, block_sizes[k], 128, 4),
                                    eights ? gpus[i].blocks : "nvidia_mma_rows");
            }
            assert_int_equal(kvl_layout_best(&fake, KVLEAF_F32, block_sizes[k], 128, 4),
                             eights ? KVLEAF_LAYOUT_DIM8 : KVLEAF_LAYOUT_ROWS);
        }
        assert_string_equal(decode_of(&fake, KVLEAF_F16, 1, 36, 4),
                            "portable_fixed"); /* no whole chunks of eight dims */
        assert_string_equal(decode_of(&fake, KVLEAF_F16, 16, 128, 17),
                            "portable_vector"); /* more heads than they serve */
        assert_string_equal(decode_of(&fake, KVLEAF_F16, 16, 256, 9), "portable_vector");
        assert_int_equal(kvl_layout_best(&fake, KVLEAF_F16, 16, 128, 16), KVLEAF_LAYOUT_SWIZZLE8);
        assert_int_equal(kvl_layout_best(&fake, KVLEAF_F16, 16, 256, 8), KVLEAF_LAYOUT_SWIZZLE8);
        assert_int_equal(kvl_layout_best(&fake, KVLEAF_F16, 16, 128, 0), KVLEAF_LAYOUT_SWIZZLE8);
    }
    kvleaf_device older = {.caps.type = CL_DEVICE_TYPE_GPU, .caps.nvidia_capability = 75};
    assert_int_equal(kvl_layout_best(&older, KVLEAF_F16, 16, 128, 4), KVLEAF_LAYOUT_DIM8);
    assert_string_equal(decode_of(&older, KVLEAF_F16, 16, 128, 4), "portable_vector");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_twins),
        cmocka_unit_test(test_offsets_are_64_bit),
        cmocka_unit_test(test_known_places),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_best_and_refused),
        cmocka_unit_test(test_best_with_tensor_cores),
    };
    return cmocka_run_group_tests_name("pool layouts", tests, open_device, close_device);
}
