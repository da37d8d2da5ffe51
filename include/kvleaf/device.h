/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_DEVICE_H
#define KVLEAF_DEVICE_H

/* One OpenCL context and device: its capabilities, its compiled programs, its kernel variants. */

#include <kvleaf/status.h>

#ifndef CL_TARGET_OPENCL_VERSION
#define CL_TARGET_OPENCL_VERSION 120
#endif
#include <CL/cl.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvleaf_device kvleaf_device;

/* Element types of q, K, V and outputs. */
typedef enum kvleaf_dtype {
    KVLEAF_F16 = 0,
    KVLEAF_BF16 = 1,
    KVLEAF_F32 = 2
} kvleaf_dtype;

/* Returns the bytes of one element, or 0 for a value that is no dtype. Any thread. */
KVLEAF_API size_t kvleaf_dtype_size(kvleaf_dtype dtype);
/* Returns "f16", "bf16" or "f32", or "?" . Any thread. */
KVLEAF_API const char *kvleaf_dtype_name(kvleaf_dtype dtype);

/* How the elements of one (block, kv head) tile lie. A packed layout serves fast variants; block sizes that are no
 * multiple of its unit are refused for it, and AUTO then takes ROWS. head_dim is padded inside as said. */
typedef enum kvleaf_layout {
    KVLEAF_LAYOUT_AUTO = 0,     /* pools: the device's best; views: STRIDED */
    KVLEAF_LAYOUT_STRIDED = 1,  /* views only: any strides; NHD and HND are strides */
    KVLEAF_LAYOUT_ROWS = 2,     /* K and V [block_size][head_dim] */
    KVLEAF_LAYOUT_CPU16 = 3,    /* head_dim padded to 16. K: [block_size/16][head_dim][16 tokens];
                                   V: [block_size/16][ceil(head_dim/64)][16 tokens][64 dims], the last part narrower */
    KVLEAF_LAYOUT_DIM8 = 4,     /* head_dim padded to 8, block_size a multiple of 8.
                                   K: [head_dim/8][block_size][8 dims]; V: [block_size][head_dim] */
    KVLEAF_LAYOUT_SWIZZLE8 = 5  /* head_dim padded to 64, with zeros; block_size a multiple of 8.
                                   K and V: [block_size/8][head_dim/64][8 tokens][64 dims], the 8-dim chunk c of token t
                                   at place c ^ (t % 8) of its row */
} kvleaf_layout;

/* The OpenCL entry points the library calls, all of OpenCL 1.2. An application may hand in its own
 * table (a shim, a tracer); tests use it to make each call fail. Every member must be set. */
typedef struct kvleaf_opencl {
    cl_int(CL_API_CALL *GetPlatformIDs)(cl_uint, cl_platform_id *, cl_uint *);
    cl_int(CL_API_CALL *GetPlatformInfo)(cl_platform_id, cl_platform_info, size_t, void *, size_t *);
    cl_int(CL_API_CALL *GetDeviceIDs)(cl_platform_id, cl_device_type, cl_uint, cl_device_id *, cl_uint *);
    cl_int(CL_API_CALL *GetDeviceInfo)(cl_device_id, cl_device_info, size_t, void *, size_t *);
    cl_context(CL_API_CALL *CreateContext)(const cl_context_properties *, cl_uint, const cl_device_id *,
                                           void(CL_CALLBACK *)(const char *, const void *, size_t, void *),
                                           void *, cl_int *);
    cl_int(CL_API_CALL *RetainContext)(cl_context);
    cl_int(CL_API_CALL *ReleaseContext)(cl_context);
    cl_int(CL_API_CALL *GetContextInfo)(cl_context, cl_context_info, size_t, void *, size_t *);
    cl_command_queue(CL_API_CALL *CreateCommandQueue)(cl_context, cl_device_id,
                                                      cl_command_queue_properties, cl_int *);
    cl_int(CL_API_CALL *RetainCommandQueue)(cl_command_queue);
    cl_int(CL_API_CALL *ReleaseCommandQueue)(cl_command_queue);
    cl_int(CL_API_CALL *GetCommandQueueInfo)(cl_command_queue, cl_command_queue_info, size_t, void *, size_t *);
    cl_mem(CL_API_CALL *CreateBuffer)(cl_context, cl_mem_flags, size_t, void *, cl_int *);
    cl_int(CL_API_CALL *RetainMemObject)(cl_mem);
    cl_int(CL_API_CALL *ReleaseMemObject)(cl_mem);
    cl_int(CL_API_CALL *GetMemObjectInfo)(cl_mem, cl_mem_info, size_t, void *, size_t *);
    cl_program(CL_API_CALL *CreateProgramWithSource)(cl_context, cl_uint, const char **, const size_t *, cl_int *);
    cl_program(CL_API_CALL *CreateProgramWithBinary)(cl_context, cl_uint, const cl_device_id *, const size_t *,
                                                     const unsigned char **, cl_int *, cl_int *);
    cl_int(CL_API_CALL *BuildProgram)(cl_program, cl_uint, const cl_device_id *, const char *,
                                      void(CL_CALLBACK *)(cl_program, void *), void *);
    cl_int(CL_API_CALL *GetProgramInfo)(cl_program, cl_program_info, size_t, void *, size_t *);
    cl_int(CL_API_CALL *GetProgramBuildInfo)(cl_program, cl_device_id, cl_program_build_info, size_t, void *,
                                             size_t *);
    cl_int(CL_API_CALL *ReleaseProgram)(cl_program);
    cl_kernel(CL_API_CALL *CreateKernel)(cl_program, const char *, cl_int *);
    cl_int(CL_API_CALL *ReleaseKernel)(cl_kernel);
    cl_int(CL_API_CALL *SetKernelArg)(cl_kernel, cl_uint, size_t, const void *);
    cl_int(CL_API_CALL *GetKernelWorkGroupInfo)(cl_kernel, cl_device_id, cl_kernel_work_group_info, size_t,
                                                void *, size_t *);
    cl_int(CL_API_CALL *EnqueueNDRangeKernel)(cl_command_queue, cl_kernel, cl_uint, const size_t *, const size_t *,
                                              const size_t *, cl_uint, const cl_event *, cl_event *);
    cl_int(CL_API_CALL *EnqueueReadBuffer)(cl_command_queue, cl_mem, cl_bool, size_t, size_t, void *, cl_uint,
                                           const cl_event *, cl_event *);
    cl_int(CL_API_CALL *EnqueueWriteBuffer)(cl_command_queue, cl_mem, cl_bool, size_t, size_t, const void *,
                                            cl_uint, const cl_event *, cl_event *);
    cl_int(CL_API_CALL *EnqueueFillBuffer)(cl_command_queue, cl_mem, const void *, size_t, size_t, size_t, cl_uint,
                                           const cl_event *, cl_event *);
    cl_int(CL_API_CALL *EnqueueMarkerWithWaitList)(cl_command_queue, cl_uint, const cl_event *, cl_event *);
    cl_int(CL_API_CALL *RetainEvent)(cl_event);
    cl_int(CL_API_CALL *ReleaseEvent)(cl_event);
    cl_int(CL_API_CALL *GetEventInfo)(cl_event, cl_event_info, size_t, void *, size_t *);
    cl_int(CL_API_CALL *WaitForEvents)(cl_uint, const cl_event *);
    cl_int(CL_API_CALL *Flush)(cl_command_queue);
    cl_int(CL_API_CALL *Finish)(cl_command_queue); /* never called within a step */
} kvleaf_opencl;

/* Returns the table of the ICD loader the library is linked with. Any thread. */
KVLEAF_API const kvleaf_opencl *kvleaf_opencl_loader(void);

typedef struct kvleaf_device_params {
    uint32_t struct_size;
    cl_context context;             /* kvleaf_device_create: the application's; retained */
    cl_device_id device;            /* kvleaf_device_create: a device of that context */
    const char *select;             /* kvleaf_device_open: substring of platform or device name; NULL = best by type */
    const char *kernel_dir;         /* read kernel sources from this folder; NULL = those embedded at build time */
    const char *cache_dir;          /* folder of the disk cache: program binaries (but for PoCL, which has a cache of
                                       its own), trials that variants passed, which then need no other, and marks of
                                       those whose trial ended the process or failed on the device, which are then
                                       passed over; NULL = no disk cache, and a trial for each device object */
    const char *variants;           /* comma-separated globs of variant keys; where one matches a usable variant of a
                                       family, that family takes the last such; NULL = best. "decode.portable*" */
    const kvleaf_opencl *opencl;    /* NULL = kvleaf_opencl_loader(); kept by address */
    kvleaf_allocator allocator;     /* all zero = malloc and free */
    kvleaf_log_fn log;              /* NULL = silent */
    void *log_user;
    kvleaf_log_level log_level;     /* lines above this level are not made */
    uint32_t max_work_group_size;   /* caps the device's own limit; 0 = the device's */
    uint64_t max_local_bytes;       /* likewise local memory a work-group */
    uint64_t max_alloc_bytes;       /* likewise the largest single buffer */
    uint32_t deny_undocumented;     /* 1 = no variant that relies on undocumented driver behaviour; else such a one
                                       serves where it passes a trial in a context of its own */
} kvleaf_device_params;

#define KVLEAF_DEVICE_PARAMS_INIT KVLEAF_INIT(kvleaf_device_params)
#ifndef __cplusplus
#define kvleaf_device_params(...) \
    (&(kvleaf_device_params){ .struct_size = sizeof(kvleaf_device_params), __VA_ARGS__ })
#endif

/* What was read off the device; limits are already capped by the params. */
typedef struct kvleaf_caps {
    uint32_t struct_size;
    cl_device_type type;
    cl_uint vendor_id;
    cl_uint compute_units;
    size_t max_work_group_size;
    uint64_t local_bytes;
    uint64_t max_alloc_bytes;
    uint64_t global_bytes;
    uint32_t opencl_c_major, opencl_c_minor;
    uint32_t float_vector_width;    /* native, in lanes */
    bool has_fp16;                  /* cl_khr_fp16: half arithmetic */
    bool has_subgroups;
    uint32_t nvidia_capability;     /* NVIDIA's compute capability, 10 * major + minor; 0 elsewhere */
    char platform_name[128];
    char device_name[128];
    char driver_version[128];
    char device_version[128];
} kvleaf_caps;

/* Makes a device object over the application's own context and device, both retained.
 * INVALID: a null handle or a device not of that context. NO_MEMORY. DEVICE. Any thread. */
KVLEAF_API kvleaf_status kvleaf_device_create(const kvleaf_device_params *params, kvleaf_device **out);

/* Picks a device by params.select (default: discrete GPU, other GPU, accelerator, CPU, in that order) and opens a
 * context on it. DEVICE: no OpenCL platform. INVALID: nothing matches `select`; the message lists what there is. */
KVLEAF_API kvleaf_status kvleaf_device_open(const kvleaf_device_params *params, kvleaf_device **out);

/* Releases the object; caches, pools and attention objects made from it keep it alive until they are destroyed.
 * NULL is safe; sets *device to NULL. */
KVLEAF_API void kvleaf_device_destroy(kvleaf_device **device);

/* Fills *caps (caps->struct_size set by the caller). INVALID: null. Any thread. */
KVLEAF_API kvleaf_status kvleaf_device_query(const kvleaf_device *device, kvleaf_caps *caps);

/* The handles in use, not retained for the caller; NULL for a null device. Any thread. */
KVLEAF_API cl_context kvleaf_device_context(const kvleaf_device *device);
KVLEAF_API cl_device_id kvleaf_device_id(const kvleaf_device *device);

/* Makes an in-order queue on the device; the caller releases it with clReleaseCommandQueue. DEVICE. Any thread. */
KVLEAF_API kvleaf_status kvleaf_device_queue_create(kvleaf_device *device, cl_command_queue *out);

/* How a call is placed among the application's commands. NULL where it is taken = INVALID (a queue is needed). */
typedef struct kvleaf_exec {
    uint32_t struct_size;
    cl_command_queue queue;      /* of this device's context; in-order or out-of-order */
    cl_uint num_wait;
    const cl_event *wait_list;   /* waited for on the device, never on the host */
    cl_event *event_out;         /* NULL, or receives an event the caller releases */
} kvleaf_exec;

#define KVLEAF_EXEC_INIT KVLEAF_INIT(kvleaf_exec)

#ifdef __cplusplus
}
#endif
#endif
