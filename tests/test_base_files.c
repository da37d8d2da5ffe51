/* SPDX-License-Identifier: Apache-2.0 */
/* Protects files that other processes may read or write at the same time: whole or not at all, and nothing left behind.
 */
#define _XOPEN_SOURCE 700
#include "support.h"

#include "base/base.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void test_replace_then_read(void **state)
{
    static const char first[] = "first", second[] = "the second, longer and with a \0 in it";
    char *folder = support_folder(), *path = support_path(folder, "entry"), *data = NULL;
    size_t size = 0;
    (void)state;
    assert_false(kvl_file_read(NULL, path, &data, &size));
    assert_true(kvl_file_replace(path, first, sizeof first));
    assert_true(kvl_file_replace(path, second, sizeof second));
    assert_true(kvl_file_read(NULL, path, &data, &size));
    assert_int_equal(size, sizeof second);
    assert_memory_equal(data, second, sizeof second);
    assert_int_equal(data[size], 0);
    kvl_free(NULL, data);
    assert_int_equal(support_files(folder, "", NULL), 1);
    kvl_file_remove(path);
    assert_int_equal(support_files(folder, "", NULL), 0);
    free(path);
    support_folder_remove(folder);
}

static void test_read_empty_and_without_memory(void **state)
{
    support_memory memory = {.fail_at = 2};
    kvleaf_allocator allocator = support_allocator(&memory);
    char *folder = support_folder(), *path = support_path(folder, "entry"), *data = NULL;
    size_t size = 1;
    (void)state;
    assert_true(kvl_file_replace(path, "", 0));
    assert_true(kvl_file_read(&allocator, path, &data, &size));
    assert_int_equal(size, 0);
    kvl_free(&allocator, data);
    assert_false(kvl_file_read(&allocator, path, &data, &size));
    assert_int_equal(memory.live, 0);
    assert_false(kvl_file_read(&allocator, folder, &data, &size));
    assert_int_equal(memory.live, 0);
    free(path);
    support_folder_remove(folder);
}

static void test_replace_fails_without_a_trace(void **state)
{
    char *folder = support_folder(), *missing = support_path(folder, "no/such/folder"), *long_path = calloc(1, 6001);
    (void)state;
    assert_false(kvl_file_replace(missing, "x", 1));
    assert_non_null(long_path);
    memset(long_path, 'a', 6000);
    assert_false(kvl_file_replace(long_path, "x", 1));
    assert_false(kvl_folder_make(long_path));
    assert_int_equal(support_files(folder, "", NULL), 0);
    free(long_path);
    free(missing);
    support_folder_remove(folder);
}

/* A limit on the size of files stands in for a full disk: writes fail in the middle. */
static void test_replace_on_a_full_disk_keeps_the_old(void **state)
{
    char *folder = support_folder(), *path = support_path(folder, "entry"), *big = calloc(1, 1 << 20), *data = NULL;
    size_t size = 0;
    struct rlimit before, limit;
    (void)state;
    assert_true(kvl_file_replace(path, "old", 3));
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = before;
    limit.rlim_cur = 4096;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    bool replaced = kvl_file_replace(path, big, 1 << 20);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
    assert_false(replaced);
    assert_true(kvl_file_read(NULL, path, &data, &size));
    assert_int_equal(size, 3);
    assert_memory_equal(data, "old", 3);
    assert_int_equal(support_files(folder, "", NULL), 1);
    kvl_free(NULL, data);
    free(big);
    free(path);
    support_folder_remove(folder);
}

/* Written in pieces it is as if written at once: it stands in its place when closed to be kept, and not before. */
static void test_pieces(void **state)
{
    char *folder = support_folder(), *path = support_path(folder, "entry"), read[8] = {0}, *data = NULL;
    kvl_file *file = NULL;
    uint64_t size = 0;
    size_t whole = 0;
    (void)state;
    assert_true(kvl_file_replace(path, "old", 3));
    for (int keep = 0; keep < 2; keep++) {
        ASSERT_OK(kvl_file_create(NULL, path, &file));
        assert_true(kvl_file_write(file, "the ", 4));
        assert_true(kvl_file_write(file, "new", 3));
        assert_true(kvl_file_read(NULL, path, &data, &whole));
        assert_int_equal(whole, 3);
        kvl_free(NULL, data);
        assert_int_equal(support_files(folder, "", NULL), 2);
        assert_int_equal(kvl_file_close(file, keep), keep);
        assert_int_equal(support_files(folder, "", NULL), 1);
    }
    ASSERT_OK(kvl_file_open(NULL, path, &file, &size));
    assert_int_equal(size, 7);
    assert_true(kvl_file_read_at(file, 4, read, 3));
    assert_true(kvl_file_read_at(file, 0, read + 3, 3));
    assert_string_equal(read, "newthe");
    assert_false(kvl_file_read_at(file, 4, read, 4));
    assert_false(kvl_file_read_at(file, UINT64_MAX, read, 1));
    assert_true(kvl_file_close(file, false));
    assert_false(kvl_file_close(NULL, true));
    free(path);
    support_folder_remove(folder);
}

static void test_pieces_refused(void **state)
{
    support_memory memory = {.fail_at = 1};
    kvleaf_allocator allocator = support_allocator(&memory);
    char *folder = support_folder(), *path = support_path(folder, "entry"), *missing = support_path(folder, "no/such");
    kvl_file *file = NULL;
    uint64_t size = 0;
    (void)state;
    ASSERT_STATUS(KVLEAF_NO_MEMORY, kvl_file_create(&allocator, path, &file));
    assert_int_equal(support_files(folder, "", NULL), 0);
    memory.fail_at = 0;
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvl_file_open(&allocator, path, &file, &size));
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvl_file_open(&allocator, folder, &file, &size));
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvl_file_open(&allocator, missing, &file, &size));
    ASSERT_FAILS(KVLEAF_INVALID, "path", kvl_file_create(&allocator, missing, &file));
    assert_true(kvl_file_replace(path, "old", 3));
    memory.allocations = 0;
    memory.fail_at = 1;
    ASSERT_STATUS(KVLEAF_NO_MEMORY, kvl_file_open(&allocator, path, &file, &size));
    assert_null(file);
    assert_int_equal(memory.live, 0);
    free(missing);
    free(path);
    support_folder_remove(folder);
}

static void test_folders(void **state)
{
    char *folder = support_folder(), *deep = support_path(folder, "a/b//c/"), *file = support_path(folder, "a/file");
    char *below = support_path(folder, "a/file/b");
    struct stat status;
    (void)state;
    assert_true(kvl_folder_make(deep));
    assert_int_equal(stat(deep, &status), 0);
    assert_true(S_ISDIR(status.st_mode));
    assert_true(kvl_folder_make(deep));
    assert_true(kvl_file_replace(file, "x", 1));
    assert_false(kvl_folder_make(below));
    free(below);
    free(file);
    free(deep);
    support_folder_remove(folder);
}

/* Readers see one of the whole contents, whoever writes. */
static void test_readers_beside_writers(void **state)
{
    enum { SIZE = 100000, ROUNDS = 200 };
    char *folder = support_folder(), *path = support_path(folder, "entry"), *data = NULL;
    char *content = malloc(SIZE);
    (void)state;
    assert_non_null(content);
    memset(content, 'a', SIZE);
    assert_true(kvl_file_replace(path, content, SIZE));
    pid_t writer = fork();
    assert_true(writer >= 0);
    if (writer == 0) {
        for (int i = 0; i < ROUNDS; i++) {
            memset(content, 'a' + i % 26, SIZE);
            if (!kvl_file_replace(path, content, SIZE))
                _exit(1);
        }
        _exit(0);
    }
    for (int i = 0; i < ROUNDS; i++) {
        size_t size = 0;
        assert_true(kvl_file_read(NULL, path, &data, &size));
        assert_int_equal(size, SIZE);
        for (int at = 1; at < SIZE; at++) {
            if (data[at] != data[0])
                fail_msg("byte %d is of another writing than byte 0", at);
        }
        kvl_free(NULL, data);
    }
    int status = 0;
    assert_int_equal(waitpid(writer, &status, 0), writer);
    assert_int_equal(status, 0);
    free(content);
    free(path);
    support_folder_remove(folder);
}

/* What goes on is told from what a process that died left behind; who has no place for a mark goes on without. */
static void test_marks(void **state)
{
    char *folder = support_folder(), *path = support_path(folder, "mark"), *nowhere = support_path(folder, "no/mark");
    kvl_mark *mark, *second;
    support_memory memory = {.fail_at = 2};
    kvleaf_allocator allocator = support_allocator(&memory);
    (void)state;
    for (int round = 0; round < 2; round++) {
        assert_true(kvl_mark_begin(NULL, path, &mark));
        assert_non_null(mark);
        assert_true(kvl_mark_begin(NULL, path, &second)); /* the other goes on */
        assert_null(second);
        kvl_mark_end(mark, false);
        assert_int_equal(support_files(folder, "", NULL), 0);
    }
    assert_true(kvl_mark_begin(NULL, nowhere, &mark));
    assert_null(mark);
    kvl_mark_end(NULL, false);
    assert_true(kvl_mark_begin(&allocator, path, &mark));
    assert_true(kvl_mark_begin(&allocator, nowhere, &second));
    kvl_mark_end(mark, false);
    assert_true(kvl_mark_begin(&allocator, path, &mark)); /* no memory for it */
    assert_null(mark);
    assert_int_equal(support_files(folder, "", NULL), 0);
    assert_int_equal(memory.live, 0);
    pid_t dies = fork();
    if (dies == 0)
        _exit(kvl_mark_begin(NULL, path, &mark) && mark ? 0 : 1);
    int status = 1;
    assert_int_equal(waitpid(dies, &status, 0), dies);
    assert_int_equal(status, 0);
    for (int round = 0; round < 2; round++) { /* until the file is removed */
        assert_false(kvl_mark_begin(NULL, path, &mark));
        assert_null(mark);
    }
    kvl_file_remove(path);
    assert_true(kvl_mark_begin(NULL, path, &mark));
    assert_string_equal(kvl_mark_path(mark), path);
    kvl_mark_end(mark, true); /* the same without a death */
    assert_false(kvl_mark_begin(NULL, path, &mark));
    kvl_file_remove(path);
    assert_true(kvl_mark_begin(NULL, path, &mark));
    kvl_mark_end(mark, false);
    free(nowhere);
    free(path);
    support_folder_remove(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_replace_then_read),
        cmocka_unit_test(test_read_empty_and_without_memory),
        cmocka_unit_test(test_replace_fails_without_a_trace),
        cmocka_unit_test(test_replace_on_a_full_disk_keeps_the_old),
        cmocka_unit_test(test_pieces),
        cmocka_unit_test(test_pieces_refused),
        cmocka_unit_test(test_folders),
        cmocka_unit_test(test_readers_beside_writers),
        cmocka_unit_test(test_marks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
