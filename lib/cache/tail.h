/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_TAIL_H
#define KVL_TAIL_H

/* The order of a cache's commands: what one call enqueues runs after what the call before enqueued, whatever queues the
 * two were given. As long as all calls come with one in-order queue, that queue sees to it, nothing is waited for and
 * no event is made. From the first call on another queue, or on an out-of-order one, each call's first command waits on
 * the tail, the event of the last command of the call before, and its own last command becomes the new tail. */

#include "device/chain.h"

#define KVL_TAIL_WAITS 16

typedef struct kvl_tail {
    kvleaf_device *device;
    kvl_mutex *mutex;       /* held from kvl_tail_begin to kvl_tail_end */
    cl_command_queue queue; /* of the last call; retained; NULL before the first */
    bool many;              /* more than one in-order queue has been seen */
    cl_event event;         /* many: the tail; NULL = nothing to wait for */
    cl_int failure;         /* of a command that failed on the device; 0 = none */
} kvl_tail;

/* One call's commands. */
typedef struct kvl_tail_call {
    kvl_tail *tail;
    kvl_chain chain; /* to enqueue on */
    cl_command_queue queue;
    bool many;
    cl_event own;        /* becomes the tail */
    cl_event gathered;   /* stands for a wait list that does not fit in `waits`; NULL = none */
    cl_event *event_out; /* the caller's */
    cl_event waits[KVL_TAIL_WAITS];
} kvl_tail_call;

kvleaf_status kvl_tail_create(kvl_tail *tail, kvleaf_device *device);
/* Takes a zeroed tail too. */
void kvl_tail_destroy(kvl_tail *tail);

/* Checks exec and begins a call. On success the tail is locked until kvl_tail_end. DEVICE: now, or after a failure on
 * the device. */
kvleaf_status kvl_tail_begin(kvl_tail *tail, const kvleaf_exec *exec, kvl_tail_call *call);
/* Ends it, also after a failure, and returns the call's status. What was enqueued before a failure still counts. */
kvleaf_status kvl_tail_end(kvl_tail_call *call, kvleaf_status status);

/* Sends what was enqueued to the device, so that a step found in flight does get done. Locks, so not within a call. */
void kvl_tail_flush(kvl_tail *tail);

/* Notes that a command failed on the device: from now on every call answers DEVICE. Locks, so not within a call. */
void kvl_tail_fail(kvl_tail *tail, cl_int failure);
/* OK, or DEVICE after a failure on the device. */
kvleaf_status kvl_tail_check(kvl_tail *tail);

#endif
