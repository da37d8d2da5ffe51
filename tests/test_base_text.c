/* SPDX-License-Identifier: Apache-2.0 */
/* Protects what every layer's failures, memory and texts rest on: the last error, the allocator, growing text, globs
 * and checked arithmetic. */
#include "support.h"

#include "base/base.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void test_fail_names_field_value_limit(void **state)
{
    (void)state;
    kvleaf_status status =
        kvl_fail(KVLEAF_UNSUPPORTED, "head_dim", 300, 256, "head_dim is %d, the limit is %d", 300, 256);
    const kvleaf_error *error = kvleaf_last_error();
    assert_int_equal(status, KVLEAF_UNSUPPORTED);
    assert_int_equal(error->status, KVLEAF_UNSUPPORTED);
    assert_int_equal(error->value, 300);
    assert_int_equal(error->limit, 256);
    assert_int_equal(error->cl_error, 0);
    assert_string_equal(error->field, "head_dim");
    assert_string_equal(error->message, "head_dim is 300, the limit is 256");
    assert_string_equal(error->build_log, "");
}

static void test_fail_range_gives_the_nearer_limit(void **state)
{
    (void)state;
    assert_int_equal(kvl_fail_range("block_size", 0, 1, 256), KVLEAF_INVALID);
    assert_int_equal(kvleaf_last_error()->limit, 1);
    kvl_fail_range("block_size", 257, 1, 256);
    assert_int_equal(kvleaf_last_error()->limit, 256);
    assert_string_equal(kvleaf_last_error()->message, "block_size is 257, must be 1 .. 256");
}

static void test_fail_opencl_tells_memory_from_device(void **state)
{
    static const struct {
        int32_t code;
        kvleaf_status status;
    } cases[] = {{-4, KVLEAF_NO_MEMORY},
                 {-6, KVLEAF_NO_MEMORY},
                 {-5, KVLEAF_DEVICE},
                 {-11, KVLEAF_DEVICE},
                 {-1001, KVLEAF_DEVICE}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(kvl_fail_opencl("clBuildProgram", cases[i].code), cases[i].status);
        assert_int_equal(kvleaf_last_error()->cl_error, cases[i].code);
        assert_non_null(strstr(kvleaf_last_error()->message, "clBuildProgram"));
    }
}

static void test_build_log_belongs_to_one_failure(void **state)
{
    (void)state;
    kvl_fail_opencl("clBuildProgram", -11);
    kvl_fail_log("line 3: oops");
    assert_string_equal(kvleaf_last_error()->build_log, "line 3: oops");
    kvl_fail_null("out");
    assert_string_equal(kvleaf_last_error()->build_log, "");
    assert_string_equal(kvleaf_last_error()->message, "out is null");
}

static void test_fail_cuts_long_texts(void **state)
{
    char *text = malloc(100000);
    (void)state;
    assert_non_null(text);
    memset(text, 'x', 99999);
    text[99999] = 0;
    kvl_fail(KVLEAF_INVALID, text, 0, 0, "%s", text);
    kvl_fail_log(text);
    const kvleaf_error *error = kvleaf_last_error();
    assert_in_range(strlen(error->field), 16, 4096);
    assert_in_range(strlen(error->message), 256, 65536);
    assert_in_range(strlen(error->build_log), 4096, 65536);
    free(text);
}

static void test_check_struct(void **state)
{
    (void)state;
    assert_int_equal(kvl_check_struct(NULL, 0, 16, "params"), KVLEAF_INVALID);
    assert_int_equal(kvl_check_struct(state, 0, 16, "params"), KVLEAF_INVALID);
    assert_int_equal(kvl_check_struct(state, 24, 16, "params"), KVLEAF_INVALID);
    assert_int_equal(kvleaf_last_error()->value, 24);
    assert_int_equal(kvleaf_last_error()->limit, 16);
    assert_int_equal(kvl_check_struct(state, 16, 16, "params"), KVLEAF_OK);
}

static void test_error_put_aside_and_back(void **state)
{
    support_memory memory = {0};
    kvleaf_allocator allocator = support_allocator(&memory);
    (void)state;
    kvl_fail_opencl("clFinish", -36);
    kvl_fail_log("a log");
    kvl_error_state *before = kvl_error_save(&allocator);
    assert_non_null(before);
    kvl_fail(KVLEAF_INVALID, "q", 1, 2, "something else");
    kvl_error_restore(&allocator, before);
    assert_int_equal(kvleaf_last_error()->cl_error, -36);
    assert_string_equal(kvleaf_last_error()->build_log, "a log");
    assert_non_null(strstr(kvleaf_last_error()->message, "clFinish"));
    assert_int_equal(memory.live, 0);
    memory = (support_memory){.fail_at = 1};
    assert_null(kvl_error_save(&allocator));
    kvl_error_restore(&allocator, NULL);
    assert_int_equal(kvleaf_last_error()->cl_error, -36);
}

static void *fail_elsewhere(void *ignored)
{
    (void)ignored;
    kvl_fail(KVLEAF_STALE, "seq", 7, 0, "on another thread");
    return NULL;
}

static void test_last_error_is_the_threads_own(void **state)
{
    pthread_t thread;
    (void)state;
    kvl_fail(KVLEAF_INVALID, "mine", 1, 0, "on this thread");
    assert_int_equal(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
    pthread_join(thread, NULL);
    assert_string_equal(kvleaf_last_error()->field, "mine");
}

static void test_status_names(void **state)
{
    (void)state;
    assert_string_equal(kvleaf_status_name(KVLEAF_OK), "KVLEAF_OK");
    assert_string_equal(kvleaf_status_name(KVLEAF_NO_BLOCKS), "KVLEAF_NO_BLOCKS");
    assert_string_equal(kvleaf_status_name(KVLEAF_DEVICE), "KVLEAF_DEVICE");
    assert_string_equal(kvleaf_status_name((kvleaf_status)-11), "unknown status");
    assert_string_equal(kvleaf_status_name((kvleaf_status)1), "unknown status");
    assert_string_equal(kvleaf_version(), "0.1.0");
}

static void test_alloc_clears_and_refuses_overflow(void **state)
{
    support_memory memory = {0};
    kvleaf_allocator allocator = support_allocator(&memory);
    (void)state;
    unsigned char *bytes = kvl_alloc(&allocator, 1000, 3);
    assert_non_null(bytes);
    for (int i = 0; i < 3000; i++)
        assert_int_equal(bytes[i], 0);
    kvl_free(&allocator, bytes);
    void *nothing = kvl_alloc(&allocator, 0, 8);
    assert_non_null(nothing);
    kvl_free(&allocator, nothing);
    kvl_free(&allocator, NULL);
    assert_int_equal(memory.live, 0);
    int64_t before = memory.allocations;
    assert_null(kvl_alloc(&allocator, SIZE_MAX / 2, 4));
    assert_null(kvl_alloc(&allocator, SIZE_MAX, 1));
    assert_int_equal(memory.allocations, before);
    void *plain = kvl_alloc(NULL, 4, 4);
    assert_non_null(plain);
    kvl_free(NULL, plain);
}

static void test_checked_arithmetic(void **state)
{
    uint64_t out = 0;
    (void)state;
    assert_true(kvl_mul(UINT32_MAX, UINT32_MAX, &out));
    assert_true(out == 18446744065119617025u);
    assert_true(kvl_mul(0, UINT64_MAX, &out) && out == 0);
    assert_true(kvl_mul(1, UINT64_MAX, &out) && out == UINT64_MAX);
    assert_false(kvl_mul(UINT64_MAX, 2, &out));
    assert_false(kvl_mul((uint64_t)1 << 32, (uint64_t)1 << 32, &out));
    assert_true(kvl_add(UINT64_MAX - 1, 1, &out) && out == UINT64_MAX);
    assert_false(kvl_add(UINT64_MAX, 1, &out));
    assert_int_equal(kvl_ceil_div(0, 16), 0);
    assert_int_equal(kvl_ceil_div(16, 16), 1);
    assert_int_equal(kvl_ceil_div(17, 16), 2);
}

static void test_text_grows(void **state)
{
    support_memory memory = {0};
    kvleaf_allocator allocator = support_allocator(&memory);
    kvl_text text = {.allocator = &allocator};
    char expected[8192] = "";
    (void)state;
    for (int i = 0; i < 500; i++) {
        kvl_text_format(&text, "%d,", i);
        snprintf(expected + strlen(expected), sizeof expected - strlen(expected), "%d,", i);
    }
    kvl_text_append(&text, "tail", 2);
    strcat(expected, "ta");
    assert_false(text.failed);
    assert_string_equal(text.data, expected);
    assert_int_equal(text.size, strlen(expected));
    kvl_text_free(&text);
    assert_int_equal(memory.live, 0);
}

static void test_text_without_memory(void **state)
{
    support_memory memory = {.fail_at = 3};
    kvleaf_allocator allocator = support_allocator(&memory);
    kvl_text text = {.allocator = &allocator};
    (void)state;
    for (int i = 0; i < 2000; i++)
        kvl_text_append(&text, "x", 1);
    assert_true(text.failed);
    assert_in_range(text.size, 1, 1999);
    assert_int_equal(strlen(text.data), text.size);
    kvl_text_free(&text);
    assert_int_equal(memory.live, 0);
}

static void test_glob(void **state)
{
    static const struct {
        const char *pattern, *text;
        bool matches;
    } cases[] = {
        {"", "", true},
        {"", "a", false},
        {"*", "", true},
        {"*", "decode.cpu", true},
        {"decode.portable*", "decode.portable.q_f16.kv_f16.d128.b16", true},
        {"decode.portable", "decode.portable.q_f16", false},
        {"*.d128.*", "decode.cpu.q_f32.kv_f16.d128.b16", true},
        {"*.d128.*", "decode.cpu.q_f32.kv_f16.d64.b16", false},
        {"*b16", "decode.b16.b16", true},
        {"*b1", "decode.b16", false},
        {"d?code*", "decode.cpu", true},
        {"?", "", false},
        {"a*b*c", "aXbYbZc", true},
        {"a*b*c", "aXbYbZ", false},
        {"***", "x", true},
        {"a**", "a", true},
        {"*aab", "aaaaab", true},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (kvl_glob(cases[i].pattern, cases[i].text) != cases[i].matches)
            fail_msg("\"%s\" against \"%s\" must be %d", cases[i].pattern, cases[i].text, cases[i].matches);
    }
}

static void test_log_keeps_to_its_level(void **state)
{
    support_lines lines = {.count = 0};
    kvl_logger logger = {support_log, &lines, KVLEAF_LOG_WARNING};
    (void)state;
    kvl_log(&logger, KVLEAF_LOG_INFO, "not made");
    kvl_log(&logger, KVLEAF_LOG_WARNING, "made %d", 7);
    kvl_log(&logger, KVLEAF_LOG_ERROR, "made too");
    assert_string_equal(lines.text, "made 7\nmade too\n");
    logger.log = NULL;
    kvl_log(&logger, KVLEAF_LOG_ERROR, "nowhere");
    kvl_log(NULL, KVLEAF_LOG_ERROR, "nowhere");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fail_names_field_value_limit),
        cmocka_unit_test(test_fail_range_gives_the_nearer_limit),
        cmocka_unit_test(test_fail_opencl_tells_memory_from_device),
        cmocka_unit_test(test_build_log_belongs_to_one_failure),
        cmocka_unit_test(test_fail_cuts_long_texts),
        cmocka_unit_test(test_check_struct),
        cmocka_unit_test(test_error_put_aside_and_back),
        cmocka_unit_test(test_last_error_is_the_threads_own),
        cmocka_unit_test(test_status_names),
        cmocka_unit_test(test_alloc_clears_and_refuses_overflow),
        cmocka_unit_test(test_checked_arithmetic),
        cmocka_unit_test(test_text_grows),
        cmocka_unit_test(test_text_without_memory),
        cmocka_unit_test(test_glob),
        cmocka_unit_test(test_log_keeps_to_its_level),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
