/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_SUPPORT_H
#define KVL_SUPPORT_H

/* What tests share: asserting on statuses, the device they run on, seeded numbers, guarded memory, temporary folders.
 * shim.h has the OpenCL table that counts and fails. */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <kvleaf/device.h>

/* The call answers the status, or the test fails with the last error. */
#define ASSERT_STATUS(status, call) support_assert((status), (call), #call, __FILE__, __LINE__)
#define ASSERT_OK(call)             ASSERT_STATUS(KVLEAF_OK, call)
/* It fails so, and the message names the field. */
#define ASSERT_FAILS(status, named, call)                                                                              \
    (support_assert((status), (call), #call, __FILE__, __LINE__), support_assert_field((named), __FILE__, __LINE__))

void support_assert(kvleaf_status expected, kvleaf_status actual, const char *call, const char *file, int line);
void support_assert_field(const char *field, const char *file, int line);

/* The device tests run on: PoCL, or what KVLEAF_TEST_DEVICE names. support_params gives the params it is opened with,
 * to be changed and opened by the test itself. */
kvleaf_device_params support_params(void);
kvleaf_device *support_device(void);
/* One that lives as long as the process, whose programs need not be built again by the next test; and a device as the
 * params say in the same context: in each context PoCL loads its built-in functions anew, which costs more than a small
 * program. Where contexts are the topic, and where two must differ, open one. */
kvleaf_device *support_shared(void);
kvleaf_status support_create(const kvleaf_device_params *params, kvleaf_device **out);
cl_command_queue support_queue(kvleaf_device *device);

/* SplitMix64. support_seed prints the seed it returns: `fallback`, or KVLEAF_TEST_SEED. */
typedef struct support_rng {
    uint64_t state;
} support_rng;
uint64_t support_seed(uint64_t fallback);
uint64_t support_next(support_rng *rng);
int32_t support_range(support_rng *rng, int32_t low, int32_t high); /* both included */
float support_float(support_rng *rng);                              /* uniform in -1 .. 1 */

/* Host memory between guard zones, filled with a byte pattern that no test writes. */
void *support_guarded(size_t size);
void support_guarded_check(const void *memory); /* fails the test where a guard was written */
void support_guarded_free(void *memory);        /* checks, then frees */

/* A device buffer filled with `poison`; its bytes back in malloc'ed memory. */
cl_mem support_buffer(kvleaf_device *device, cl_command_queue queue, size_t size, uint8_t poison);
uint8_t *support_read(cl_command_queue queue, cl_mem buffer, size_t size);

/* A new empty folder; removed with all that is in it. */
char *support_folder(void);
void support_folder_remove(char *path);
/* Malloc'ed "folder/name". */
char *support_path(const char *folder, const char *name);
void support_write(const char *path, const void *data, size_t size);
/* Malloc'ed, NUL-terminated. */
char *support_slurp(const char *path, size_t *size);
/* Files in the folder whose names end so; the name of the last one in `name`, if not NULL. */
int support_files(const char *folder, const char *ending, char name[256]);

/* A folder of kernel sources with answer.cl, whose kernel `answer` writes ANSWER, defined in common/answer.clh, to
 * out[0]. */
char *support_kernels(int answer);
void support_kernels_edit(const char *folder, int answer);
/* Runs `answer` of a program and returns what it wrote. */
int support_answer(kvleaf_device *device, cl_program program);

/* Log lines of a device: pass support_log and a pointer to one of these. */
typedef struct support_lines {
    char text[65536]; /* lines, each with a newline; later ones are left out when full */
    int count;
} support_lines;
void support_log(void *user, kvleaf_log_level level, const char *message);

/* An allocator that counts, and fails the allocation number fail_at (from 1; 0 = none). One thread at a time. */
typedef struct support_memory {
    int64_t allocations, live, fail_at;
} support_memory;
kvleaf_allocator support_allocator(support_memory *memory);

/* Bytes this process has resident, 0 where that can't be read. */
uint64_t support_resident(void);

#endif
