/* te_parts.h: the table of contents of te.h. Order of reading, of compiling and of depending: a part uses what stands
 * above it, never what stands below. */
#ifndef TE_H_INCLUDED
#define TE_H_INCLUDED

#include "api/manual.h"
#include "api/enums.h"
#include "api/base.h"
#include "api/context.h"
#include "api/tensor.h"
#include "api/autograd.h"
#include "api/ops.h"
#include "api/quant.h"
#include "api/functions.h"
#include "api/module.h"
#include "api/nn.h"
#include "api/train.h"
#include "api/io.h"
#include "api/report.h"

#endif /* TE_H_INCLUDED */

#if defined(TE_IMPLEMENTATION) && !defined(TE_IMPLEMENTATION_DONE)
#define TE_IMPLEMENTATION_DONE

/* base: pure C */
#include "base/common.h"
#include "base/numbers.h"
#include "base/philox.h"
#include "base/scaling.h"
#include "base/hash.c"
#include "base/lz.c"
#include "base/text.c"

/* sys: the operating system */
#include "sys/sys.c"
#include "sys/file.c"
#include "sys/libs.c"

/* core: context, memory, tensors, plans, tape */
#include "core/state.h"
#include "core/error.c"
#include "core/memory.c"
#include "core/tensor.c"
#include "core/plan.c"

/* backends */
#include "cpu/parallel.c"
#include "cpu/rows.c"
#include "cuda/kernels.c"
#include "cuda/driver.c"
#include "cuda/nvrtc.c"
#include "cuda/cache.c"
#include "cuda/jit.c"
#include "cuda/launch.c"

/* operations */
#include "ops/check.c"
#include "ops/math/kargs.h"
#include "ops/math/op.c"
#include "ops/math/cpu.c"
#include "ops/math/cuda.c"
#include "ops/cast/kargs.h"
#include "ops/cast/op.c"
#include "ops/cast/cpu.c"
#include "ops/cast/cuda.c"
#include "ops/nvfp4/arithmetic.h"
#include "ops/nvfp4/kargs.h"
#include "ops/nvfp4/op.c"
#include "ops/nvfp4/cpu.c"
#include "ops/nvfp4/cuda.c"
#include "ops/gemm/kargs.h"
#include "ops/gemm/op.c"
#include "ops/gemm/cpu.c"
#include "ops/gemm/cuda.c"
#include "ops/norm/kargs.h"
#include "ops/norm/op.c"
#include "ops/norm/cpu.c"
#include "ops/norm/cuda.c"
#include "ops/act/kargs.h"
#include "ops/act/op.c"
#include "ops/act/cpu.c"
#include "ops/act/cuda.c"
#include "ops/rope/kargs.h"
#include "ops/rope/op.c"
#include "ops/rope/cpu.c"
#include "ops/rope/cuda.c"
#include "ops/attn/kargs.h"
#include "ops/attn/op.c"
#include "ops/attn/cpu.c"
#include "ops/attn/cuda.c"
#include "ops/dropout/kargs.h"
#include "ops/dropout/op.c"
#include "ops/dropout/cpu.c"
#include "ops/dropout/cuda.c"
#include "ops/loss/kargs.h"
#include "ops/loss/op.c"
#include "ops/loss/cpu.c"
#include "ops/loss/cuda.c"
#include "ops/optim/kargs.h"
#include "ops/optim/op.c"
#include "ops/optim/cpu.c"
#include "ops/optim/cuda.c"
#include "ops/table.c"
#include "core/context.c"
#include "core/tape.c"
#include "core/access.c"

/* what is built from operations */
#include "quant/quantizer.c"
#include "quant/autocast.c"
#include "nn/functions.c"
#include "nn/attention.c"
#include "nn/linear.c"
#include "nn/module.c"
#include "nn/layers.c"
#include "nn/transformer.c"
#include "train/adam.c"
#include "io/json.c"
#include "io/safetensors.c"
#include "train/checkpoint.c"
#include "report.c"

#endif /* TE_IMPLEMENTATION */
