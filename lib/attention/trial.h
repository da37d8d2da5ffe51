/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVL_ATTENTION_TRIAL_H
#define KVL_ATTENTION_TRIAL_H

#include "device/variant.h"

/* Runs a small step of decode or prefill by this variant, twice, on a device that takes no other of its family, and
 * compares it with a float64 reference: sequences shorter and longer than a split or a tile, more of them than there
 * are compute units, blocks out of order, NaN in every unused slot; decode appends, where the host knows the blocks.
 * OK: all is right. UNSUPPORTED: a result is wrong, the message says which, or the step could not be made. DEVICE: it
 * failed on the device. NO_MEMORY. */
kvleaf_status kvl_trial_launch(kvleaf_device *device, const kvl_variant *variant, const kvl_geometry *geometry);

#endif
