/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_STATUS_H
#define KVLEAF_STATUS_H

/* Status codes, the last error, logging and allocation: what every other header builds on.
 * Nothing here needs OpenCL. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KVLEAF_API
#elif defined(__GNUC__)
#define KVLEAF_API __attribute__((visibility("default")))
#else
#define KVLEAF_API
#endif

/* What a params struct starts as: struct_size set, the rest zero. The KVLEAF_..._INIT of each are made of it. */
#ifdef __cplusplus
namespace kvleaf
{
template <typename params_type> inline params_type init()
{
    params_type params = params_type();
    params.struct_size = static_cast<uint32_t>(sizeof(params_type));
    return params;
}
}
#define KVLEAF_INIT(type) kvleaf::init<type>()
#else
#define KVLEAF_INIT(type) { .struct_size = sizeof(type) }
#endif

#define KVLEAF_VERSION_MAJOR 0
#define KVLEAF_VERSION_MINOR 1
#define KVLEAF_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* What a call answers. Values are pinned for ever: 0 is success, the rest negative. */
typedef enum kvleaf_status {
    KVLEAF_OK = 0,
    KVLEAF_INVALID = -1,     /* an argument is wrong; the last error names it, its value and the limit */
    KVLEAF_UNSUPPORTED = -2, /* right in itself, but not served by this version or this device */
    KVLEAF_NO_BLOCKS = -3,   /* the pool has too few available blocks; nothing changed */
    KVLEAF_TOO_SMALL = -4,   /* a buffer or a declared capacity is too small */
    KVLEAF_FOREIGN = -5,     /* an object or a sequence of another cache, device or context */
    KVLEAF_STALE = -6,       /* a sequence that was destroyed */
    KVLEAF_BUSY = -7,        /* in use by an open plan or by a step still in flight; ask again later */
    KVLEAF_NO_MEMORY = -8,   /* host or device memory could not be had */
    KVLEAF_CORRUPT = -9,     /* stored bytes fail their checksum or their format */
    KVLEAF_DEVICE = -10      /* an OpenCL call failed; the last error holds its cl_int */
} kvleaf_status;

/* The last failure on the calling thread. A successful call leaves it as it was. */
typedef struct kvleaf_error {
    kvleaf_status status;
    int32_t cl_error;        /* cl_int of the OpenCL call that failed, or 0 */
    int64_t value;           /* the offending value, where it is a number */
    int64_t limit;           /* the limit it broke, where there is one */
    const char *field;       /* the argument or params field at fault, or "" */
    const char *message;     /* one sentence in English, with field, value and limit */
    const char *build_log;   /* the log of a failed kernel build, or "" */
} kvleaf_error;

/* Returns the calling thread's last error, never NULL. The strings are valid until the next failing
 * call on this thread. Thread rule: any thread. */
KVLEAF_API const kvleaf_error *kvleaf_last_error(void);

/* Returns the constant's name, such as "KVLEAF_NO_BLOCKS", or "unknown status". Any thread. */
KVLEAF_API const char *kvleaf_status_name(kvleaf_status status);

/* Returns "major.minor.patch" of the library in use. Any thread. */
KVLEAF_API const char *kvleaf_version(void);

typedef enum kvleaf_log_level {
    KVLEAF_LOG_ERROR = 0,
    KVLEAF_LOG_WARNING = 1,
    KVLEAF_LOG_INFO = 2,
    KVLEAF_LOG_DEBUG = 3
} kvleaf_log_level;

/* Receives one line without a newline. Called on the thread that is inside the library; must not
 * call into the same object. */
typedef void (*kvleaf_log_fn)(void *user, kvleaf_log_level level, const char *message);

/* Host memory, for applications that bring their own. All zero means malloc and free.
 * allocate(user, size) returns memory aligned for any type, or NULL; release(user, NULL) is never
 * called. Called on the thread that is inside the library. */
typedef struct kvleaf_allocator {
    void *(*allocate)(void *user, size_t size);
    void (*release)(void *user, void *memory);
    void *user;
} kvleaf_allocator;

#ifdef __cplusplus
}
#endif
#endif
