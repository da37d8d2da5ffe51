/* SPDX-License-Identifier: Apache-2.0 */
#ifndef GENERATE_MODEL_SOURCE_H
#define GENERATE_MODEL_SOURCE_H

/* The text of model.cl, embedded at build time. */
extern const char model_source[];

#endif
