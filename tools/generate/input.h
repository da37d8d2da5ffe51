/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_INPUT_H
#define GENERATE_INPUT_H

/* Lines of any length out of a file descriptor, without waiting for more than is there. */

#include <stdint.h>

#include "fail.h"

typedef struct input {
    int descriptor;
    char *text; /* what was read and not yet handed out: [used] of [capacity] */
    size_t used, capacity;
    size_t taken; /* of it, handed out by the last input_line */
    int64_t line; /* of the last line handed out, from 1 */
    bool ended;
} input;

/* Reads what is there; waits for some if `wait`. False only if reading fails. */
bool input_fill(input *in, bool wait, failure *error);
/* The next whole line without its newline, valid until the next call of either; NULL where none is there yet. Blank
 * ones are skipped. */
char *input_line(input *in);
void input_release(input *in);

#endif
