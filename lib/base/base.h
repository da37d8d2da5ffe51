/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_BASE_H
#define KVL_BASE_H

/* What every layer uses: failing with a reason, host memory, checked arithmetic, logging, text, the few OS calls. */

#include <kvleaf/status.h>

#if defined(__GNUC__)
#define KVL_PRINTF(format_at, args_at) __attribute__((format(printf, format_at, args_at)))
#else
#define KVL_PRINTF(format_at, args_at)
#endif

/* Fill the thread's last error and return its status, so that a check is one line:
 *     return kvl_fail(KVLEAF_INVALID, "num_q", n, limit, "num_q is %d, the limit is %d", n, limit); */
kvleaf_status kvl_fail(kvleaf_status status, const char *field, int64_t value, int64_t limit, const char *format, ...)
    KVL_PRINTF(5, 6);
/* "field is value, must be low .. high". */
kvleaf_status kvl_fail_range(const char *field, int64_t value, int64_t low, int64_t high);
/* "field is null". */
kvleaf_status kvl_fail_null(const char *field);
/* KVLEAF_NO_MEMORY for `bytes` of host memory. */
kvleaf_status kvl_fail_memory(size_t bytes);
/* An OpenCL call that answered `cl_error`; NO_MEMORY for the codes that mean memory, else DEVICE. */
kvleaf_status kvl_fail_opencl(const char *call, int32_t cl_error);
/* A command that failed on the device after it was enqueued; always DEVICE. */
kvleaf_status kvl_fail_device(const char *command, int32_t cl_error);
/* Adds a build log to the error just made; copied. */
void kvl_fail_log(const char *build_log);
/* Checks a params struct: non-null and struct_size equal to `size`. */
kvleaf_status kvl_check_struct(const void *params, uint32_t struct_size, size_t size, const char *field);

/* The thread's last error put aside, and put back, by a call that fails inside and still succeeds: NULL where memory is
 * out. Restoring frees it and takes NULL. */
typedef struct kvl_error_state kvl_error_state;
kvl_error_state *kvl_error_save(const kvleaf_allocator *allocator);
void kvl_error_restore(const kvleaf_allocator *allocator, kvl_error_state *state);

/* Host memory by an application's allocator (all zero: malloc). kvl_alloc clears what it returns and NULL means none
 * (or count * size overflows); kvl_free takes NULL. */
void *kvl_alloc(const kvleaf_allocator *allocator, size_t count, size_t size);
void kvl_free(const kvleaf_allocator *allocator, void *memory);

/* Asks for the cache line of an address that is used soon. */
static inline void kvl_prefetch(const void *address)
{
#if defined(__GNUC__)
    __builtin_prefetch(address);
#else
    (void)address;
#endif
}

/* *out = a op b; false where it would not fit. */
bool kvl_mul(uint64_t a, uint64_t b, uint64_t *out);
bool kvl_add(uint64_t a, uint64_t b, uint64_t *out);

static inline int64_t kvl_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

typedef struct kvl_logger {
    kvleaf_log_fn log;
    void *user;
    kvleaf_log_level level;
} kvl_logger;

void kvl_log(const kvl_logger *logger, kvleaf_log_level level, const char *format, ...) KVL_PRINTF(3, 4);

/* A growing string. After a failed allocation `failed` is set and appends do nothing. */
typedef struct kvl_text {
    const kvleaf_allocator *allocator;
    char *data; /* NUL-terminated, NULL while empty */
    size_t size, capacity;
    bool failed;
} kvl_text;

void kvl_text_append(kvl_text *text, const char *data, size_t size);
void kvl_text_format(kvl_text *text, const char *format, ...) KVL_PRINTF(2, 3);
void kvl_text_free(kvl_text *text);

/* '*' and '?' wildcards; the whole of `text` must match. */
bool kvl_glob(const char *pattern, const char *text);

/* OS calls. A file read whole into *data (released with kvl_free); false where it can't be. */
bool kvl_file_read(const kvleaf_allocator *allocator, const char *path, char **data, size_t *size);
/* Written beside and renamed into place, so that readers see the old or the new one; false and no file on failure. */
bool kvl_file_replace(const char *path, const void *data, size_t size);
void kvl_file_remove(const char *path);

/* A file read or written in pieces. Opening and creating: INVALID where the path can't be, NO_MEMORY. What is created
 * is written beside and stands in its place after kvl_file_close(file, true), which answers whether it does; closed
 * otherwise it leaves nothing. Closing takes NULL. */
typedef struct kvl_file kvl_file;
kvleaf_status kvl_file_open(const kvleaf_allocator *allocator, const char *path, kvl_file **out, uint64_t *size);
bool kvl_file_read_at(kvl_file *file, uint64_t offset, void *data, size_t size);
kvleaf_status kvl_file_create(const kvleaf_allocator *allocator, const char *path, kvl_file **out);
bool kvl_file_write(kvl_file *file, const void *data, size_t size);
bool kvl_file_close(kvl_file *file, bool keep);
/* Makes the folder and its parents; true if it is there afterwards. */
bool kvl_folder_make(const char *path);

/* A mark: a file that is there while something goes on, and that a process which dies meanwhile leaves behind.
 * Beginning answers false, with *out NULL, where such a one was left behind. It answers true with *out NULL where there
 * is no telling: another holds the mark right now, or the file can't be made. Ending takes NULL; `leave` leaves the
 * file behind, as a process that dies does. */
typedef struct kvl_mark kvl_mark;
bool kvl_mark_begin(const kvleaf_allocator *allocator, const char *path, kvl_mark **out);
const char *kvl_mark_path(const kvl_mark *mark);
void kvl_mark_end(kvl_mark *mark, bool leave);

/* Milliseconds of a clock that only goes forward. */
uint64_t kvl_clock_ms(void);

typedef struct kvl_mutex kvl_mutex;
kvl_mutex *kvl_mutex_create(const kvleaf_allocator *allocator);
void kvl_mutex_destroy(const kvleaf_allocator *allocator, kvl_mutex *mutex);
void kvl_mutex_lock(kvl_mutex *mutex);
void kvl_mutex_unlock(kvl_mutex *mutex);

#endif
