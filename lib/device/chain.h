/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_CHAIN_H
#define KVL_CHAIN_H

/* Commands of one call, placed on the application's queue one after the other: the first waits on the wait list, each
 * further one on the one before, and the last gives the event. An in-order queue does that by itself, so events are
 * made only where the queue is out-of-order or one was asked for. */

#include "device/device.h"

typedef struct kvl_chain {
    kvleaf_device *device;
    cl_command_queue queue;
    bool in_order;
    cl_uint num_wait; /* what the next command waits on */
    const cl_event *wait_list;
    cl_event *event_out; /* NULL = no event wanted */
    cl_event last;       /* of the command before, NULL = none kept */
    bool gave_event;
} kvl_chain;

/* Starts a chain; nothing is enqueued. The wait list must live until kvl_chain_end. */
kvleaf_status kvl_chain_begin(kvl_chain *chain, kvleaf_device *device, const kvleaf_exec *exec);
/* The same on a queue that is known to keep order. */
kvl_chain kvl_chain_in_order(kvleaf_device *device, const kvleaf_exec *exec);

/* Enqueues a kernel. `last`: no further command follows. */
kvleaf_status kvl_chain_kernel(kvl_chain *chain, cl_kernel kernel, cl_uint dimensions, const size_t *global,
                               const size_t *local, bool last);

/* Enqueues a write that does not block: `data` must stay until *done (may be NULL) is complete; the caller releases it.
 */
kvleaf_status kvl_chain_write(kvl_chain *chain, cl_mem buffer, size_t offset, size_t size, const void *data,
                              cl_event *done);

/* A read; `wait`: blocks until it and all before it are done, otherwise `data` must stay until then. */
kvleaf_status kvl_chain_read(kvl_chain *chain, cl_mem buffer, size_t offset, size_t size, void *data, bool wait);
/* A write that blocks. */
kvleaf_status kvl_chain_write_now(kvl_chain *chain, cl_mem buffer, size_t offset, size_t size, const void *data);

/* Gives an event that stands for all commands so far; the caller releases it. */
kvleaf_status kvl_chain_mark(kvl_chain *chain, cl_event *out);

/* Ends the chain, also after a failure: gives the event if that is still owed (a marker), releases what was kept.
 * Returns `status`, or the marker's failure where status was OK. */
kvleaf_status kvl_chain_end(kvl_chain *chain, kvleaf_status status);

#endif
