/* SPDX-License-Identifier: Apache-2.0 */
/* How pieces of work spread over compute units that take them from a queue. */
#include "attention/state.h"

/* No unit has `longest` more than another, so places are taken modulo more than that. Pieces of a length go to all
 * units at once that have equally little. */
kvl_loads kvl_queue_share(const int32_t *pieces, int32_t longest, int64_t times, int64_t units)
{
    kvl_loads loads = {.having[0] = units};
    for (int32_t length = longest; length > 0; length--) {
        int64_t left = pieces[length] * times;
        if (!left)
            continue;
        int64_t rounds = left / units - longest / length; /* more than it takes to even them out */
        rounds = rounds > 0 ? rounds : 0;
        loads.alike += rounds * length;
        for (left -= rounds * units; left > 0;) {
            int64_t *first = &loads.having[loads.least % KVL_QUEUE_PLACES], taken = left < *first ? left : *first;
            *first -= taken;
            loads.having[(loads.least + length) % KVL_QUEUE_PLACES] += taken;
            left -= taken;
            loads.least += *first == 0;
        }
    }
    return loads;
}

int64_t kvl_queue_last(const kvl_loads *loads)
{
    int64_t last = loads->least + KVL_QUEUE_PLACES - 1;
    while (!loads->having[last % KVL_QUEUE_PLACES])
        last--;
    return loads->alike + last;
}
