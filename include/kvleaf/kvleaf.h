/* SPDX-License-Identifier: Apache-2.0 */
#ifndef KVLEAF_KVLEAF_H
#define KVLEAF_KVLEAF_H

/* Everything of kvleaf. Programs that only manage blocks include <kvleaf/blocks.h> and link libkvleaf-blocks. */

#include <kvleaf/attention.h>
#include <kvleaf/blocks.h>
#include <kvleaf/cache.h>
#include <kvleaf/device.h>
#include <kvleaf/pool.h>
#include <kvleaf/snapshot.h>
#include <kvleaf/status.h>

#endif
