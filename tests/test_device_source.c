/* SPDX-License-Identifier: Apache-2.0 */
/* Protects the expansion of includes: each file once, true file names and line numbers, nothing from outside the
 * folder. */
#include "support.h"

#include "device/program.h"
#include "device/source.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A kernel folder with common/, and a device object that knows nothing else. */
typedef struct fixture {
    char *folder;
    kvleaf_device device;
    support_memory memory;
} fixture;

static void add(fixture *f, const char *name, const char *text)
{
    char *path = support_path(f->folder, name);
    support_write(path, text, strlen(text));
    free(path);
}

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    f->folder = support_folder();
    f->device.kernel_dir = f->folder;
    f->device.allocator = support_allocator(&f->memory);
    char *common = support_path(f->folder, "common");
    assert_true(kvl_folder_make(common));
    free(common);
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    assert_int_equal(f->memory.live, 0);
    support_folder_remove(f->folder);
    free(f);
    return 0;
}

static void expands_to(fixture *f, const char *file, const char *expected)
{
    kvl_text text = {.allocator = &f->device.allocator};
    ASSERT_OK(kvl_source_expand(&f->device, file, &text));
    assert_string_equal(text.data, expected);
    assert_int_equal(text.size, strlen(expected));
    kvl_text_free(&text);
}

static void refuses(fixture *f, const char *file, const char *field)
{
    kvl_text text = {.allocator = &f->device.allocator};
    ASSERT_FAILS(KVLEAF_INVALID, field, kvl_source_expand(&f->device, file, &text));
    kvl_text_free(&text);
}

static void test_includes_are_expanded_in_place(void **state)
{
    fixture *f = *state;
    add(f, "common/b.clh", "b\n");
    add(f, "a.cl", "1\n  #  include   \"common/b.clh\"  // why\n3\n");
    expands_to(f, "a.cl",
               "#line 1 \"cl_kernels/a.cl\"\n1\n"
               "#line 1 \"cl_kernels/common/b.clh\"\nb\n"
               "#line 3 \"cl_kernels/a.cl\"\n3\n");
}

static void test_a_file_comes_once(void **state)
{
    fixture *f = *state;
    add(f, "common/b.clh", "b\n");
    add(f, "common/c.clh", "#include \"common/b.clh\"\n#include \"a.cl\"\nc\n");
    add(f, "a.cl", "#include \"common/c.clh\"\n#include \"common/b.clh\"\na\n");
    expands_to(f, "a.cl",
               "#line 1 \"cl_kernels/a.cl\"\n"
               "#line 1 \"cl_kernels/common/c.clh\"\n"
               "#line 1 \"cl_kernels/common/b.clh\"\nb\n"
               "#line 2 \"cl_kernels/common/c.clh\"\n"
               "#line 3 \"cl_kernels/common/c.clh\"\nc\n"
               "#line 2 \"cl_kernels/a.cl\"\n"
               "#line 3 \"cl_kernels/a.cl\"\na\n");
}

/* A kernel file begins with its licence and a #line directive, which would shift the numbers by what stands above it.
 */
static void test_own_line_directive_gives_way(void **state)
{
    fixture *f = *state;
    add(f, "a.cl", "/* licence */\n#line 1 \"cl_kernels/a.cl\"\nthird\n");
    expands_to(f, "a.cl", "#line 1 \"cl_kernels/a.cl\"\n/* licence */\n\nthird\n");
}

static void test_what_is_no_include_stays(void **state)
{
    static const char text[] = "/* see\n#include \"common/none.clh\"\n*/\n// #include \"common/none.clh\"\n"
                               "#include <stdint.h>\n#define X \"#include\"\nint x; #include \"no\"\n#pragma OPENCL\n"
                               "/* a */ /* b\n#include \"common/none.clh\" */ int y;\nint z; // /* open\n#define Y 1\n";
    fixture *f = *state;
    char expected[1024];
    snprintf(expected, sizeof expected, "#line 1 \"cl_kernels/a.cl\"\n%s", text);
    add(f, "a.cl", text);
    expands_to(f, "a.cl", expected);
}

static void test_include_after_a_line_comment_that_opens_a_block(void **state)
{
    fixture *f = *state;
    add(f, "common/b.clh", "b\n");
    add(f, "a.cl", "int z; // /* not open\n#include \"common/b.clh\"\n");
    expands_to(f, "a.cl",
               "#line 1 \"cl_kernels/a.cl\"\nint z; // /* not open\n"
               "#line 1 \"cl_kernels/common/b.clh\"\nb\n#line 3 \"cl_kernels/a.cl\"\n");
}

static void test_no_newline_at_the_end_and_empty(void **state)
{
    fixture *f = *state;
    add(f, "common/b.clh", "b");
    add(f, "common/empty.clh", "");
    add(f, "a.cl", "#include \"common/b.clh\"\n#include \"common/empty.clh\"\nlast");
    expands_to(f, "a.cl",
               "#line 1 \"cl_kernels/a.cl\"\n#line 1 \"cl_kernels/common/b.clh\"\nb\n#line 2 \"cl_kernels/a.cl\"\n"
               "#line 1 \"cl_kernels/common/empty.clh\"\n#line 3 \"cl_kernels/a.cl\"\nlast\n");
}

static void test_nothing_outside_the_folder(void **state)
{
    static const char *const names[] = {
        "../secret.clh",     "/etc/hostname", "common/../../secret.clh", "common/..", "..", "",
        "common\\..\\x.clh", "c:x.clh"};
    fixture *f = *state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char text[256];
        snprintf(text, sizeof text, "#include \"%s\"\n", names[i]);
        add(f, "a.cl", text);
        refuses(f, "a.cl", "file");
        refuses(f, names[i], "file");
    }
}

static void test_missing_files_are_named(void **state)
{
    fixture *f = *state;
    refuses(f, "none.cl", "kernel_dir");
    assert_non_null(strstr(kvleaf_last_error()->message, "none.cl"));
    add(f, "a.cl", "#include \"common/none.clh\"\n");
    refuses(f, "a.cl", "kernel_dir");
    assert_non_null(strstr(kvleaf_last_error()->message, "common/none.clh"));
    f->device.kernel_dir = NULL;
    refuses(f, "none.cl", "file");
}

static void test_too_many_files(void **state)
{
    fixture *f = *state;
    for (int i = 0; i < 40; i++) {
        char name[32], text[64];
        snprintf(name, sizeof name, "%d.cl", i);
        snprintf(text, sizeof text, "#include \"%d.cl\"\n", i + 1);
        add(f, name, text);
    }
    refuses(f, "0.cl", "file");
}

static void test_each_failed_allocation(void **state)
{
    fixture *f = *state;
    add(f, "common/b.clh", "b\n");
    add(f, "a.cl", "#include \"common/b.clh\"\n");
    int failures = 0;
    for (int64_t k = 1; k < 100; k++) {
        kvl_text text = {.allocator = &f->device.allocator};
        f->memory = (support_memory){.fail_at = k};
        kvleaf_status status = kvl_source_expand(&f->device, "a.cl", &text);
        kvl_text_free(&text);
        assert_int_equal(f->memory.live, 0);
        if (status == KVLEAF_OK)
            break;
        /* A file that can't be held counts as one that can't be read. */
        assert_true(status == KVLEAF_NO_MEMORY || status == KVLEAF_INVALID);
        failures++;
    }
    assert_in_range(failures, 4, 20);
}

static void test_every_embedded_kernel_expands(void **state)
{
    fixture *f = *state;
    f->device.kernel_dir = NULL;
    assert_true(kvl_source_count > 0);
    for (int i = 0; i < kvl_source_count; i++) {
        kvl_text text = {.allocator = &f->device.allocator};
        assert_int_equal(strlen(kvl_sources[i].text), kvl_sources[i].size);
        ASSERT_OK(kvl_source_expand(&f->device, kvl_sources[i].name, &text));
        assert_null(strstr(text.data, "#include \""));
        kvl_text_free(&text);
    }
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_includes_are_expanded_in_place),
        TEST(test_a_file_comes_once),
        TEST(test_own_line_directive_gives_way),
        TEST(test_what_is_no_include_stays),
        TEST(test_include_after_a_line_comment_that_opens_a_block),
        TEST(test_no_newline_at_the_end_and_empty),
        TEST(test_nothing_outside_the_folder),
        TEST(test_missing_files_are_named),
        TEST(test_too_many_files),
        TEST(test_each_failed_allocation),
        TEST(test_every_embedded_kernel_expands),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
