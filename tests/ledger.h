/* SPDX-License-Identifier: Apache-2.0 */
#ifndef LEDGER_H
#define LEDGER_H

/* An allocator that counts what lives, and fails the call number `fail_at`, from 1; 0 = none. */

#include <stdint.h>
#include <stdlib.h>

typedef struct ledger {
    int64_t calls, fail_at, live;
} ledger;

static inline void *counted_allocate(void *user, size_t size)
{
    ledger *l = user;
    if (l->fail_at && ++l->calls == l->fail_at)
        return NULL;
    l->live++;
    return malloc(size);
}

static inline void counted_release(void *user, void *memory)
{
    ((ledger *)user)->live--;
    free(memory);
}

#endif
