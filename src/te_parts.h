/* te_parts.h: the table of contents of te.h. It lists the parts in the order of compilation. A part uses only parts
 * above it. */
#ifndef TE_H_INCLUDED
#define TE_H_INCLUDED

#if defined(TE_STATIC) && !defined(TE_IMPLEMENTATION)
#error "TE_STATIC makes te.h's functions private to this file: define TE_IMPLEMENTATION, too, before including it"
#undef TE_STATIC /* or a warning for each function would follow */
#endif

#include "api/manual.h"
#include "api/enums.h"
#include "api/base.h"
#include "api/context.h"
#include "api/tensor.h"
#include "api/autograd.h"
#include "api/ops.h"
#include "api/ops_quant.h"
#if !defined(TE_NO_MOE) || !defined(TE_NO_DIST)
#include "api/ops_moe.h"
#endif
#include "api/ops_model.h"
#include "api/ops_train.h"
#include "api/trace.h"
#ifndef TE_NO_DIST
#include "api/dist.h"
#endif
#include "api/quant.h"
#include "api/options.h"
#include "api/functions.h"
#include "api/attention_keys.h"
#include "api/module.h"
#include "api/backends.h"
#include "api/step.h"
#include "api/nn.h"
#include "api/inference.h"
#ifndef TE_NO_DIST
#include "api/context_parallel.h"
#endif
#ifndef TE_NO_MOE
#include "api/moe.h"
#endif
#include "api/train.h"
#include "api/optimizer_states.h"
#include "api/graph.h"
#include "api/io.h"
#ifndef TE_NO_LM
#include "api/models.h"
#endif
#ifndef TE_NO_ONNX
#include "api/onnx.h"
#endif
#ifndef TE_NO_AUTOMODEL
#include "api/backend.h"
#include "api/attention_backends.h"
#include "api/patches.h"
#include "api/formats.h"
#include "api/inject.h"
#endif
#ifndef TE_NO_LORA
#include "api/lora.h"
#endif
#ifndef TE_NO_DIST
#include "api/sharding.h"
#endif
#ifndef TE_NO_MOE
#include "api/experts.h"
#endif
#if !defined(TE_NO_AUTOMODEL) && !defined(TE_NO_MOE)
#include "api/moe_backend.h"
#endif
#include "api/report.h"

#endif /* TE_H_INCLUDED */

#if defined(TE_IMPLEMENTATION) && !defined(TE_IMPLEMENTATION_DONE)
#define TE_IMPLEMENTATION_DONE

/* Some functions are called only by optional areas such as `lm` or `moe`. If these areas are left out, the functions
 * stay in te.h and are unused. */
#if defined(TE_NO_AUTOMODEL) || defined(TE_NO_LORA) || defined(TE_NO_LM) || defined(TE_NO_ONNX) || \
    defined(TE_NO_MOE) || defined(TE_NO_DIST) || defined(TE_NO_CUDA) || defined(TE_NO_PTX)
#define TE__LEFT_OUT
#endif
#if defined(TE__LEFT_OUT) && defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#elif defined(TE__LEFT_OUT) && defined(_MSC_VER)
#pragma warning(push)
#pragma warning(disable : 4505)
#endif

/* base: pure C */
#include "base/common.h"
#include "base/numbers.h"
#include "base/philox.h"
#include "base/scaling.h"
#include "base/sequences.h"
#include "base/outside.h"
#include "base/hash.c"
#ifndef TE_NO_DIST
#include "base/sha256.c"
#endif
#if !defined(TE_NO_CUDA) && !defined(TE_NO_PTX)
#include "base/lz.c"
#endif
#include "base/text.c"
#include "base/fields.c"

/* sys: the operating system */
#include "sys/sys.c"
#include "sys/floats.c"
#include "sys/file.c"
#include "sys/libs.c"
#ifndef TE_NO_DIST
#include "sys/net.c"
#endif

/* core: context, memory, tensors, plans, tape */
#include "core/state.h"
#include "core/rooms.c"
#include "core/error.c"
#include "core/stream.c"
#include "core/memory.c"
#include "core/tensor.c"
#include "core/transfer.c"
#include "core/plan.c"
#include "core/outside.c"
#include "core/context.c"

/* backends */
#include "cpu/parallel.c"
#include "cpu/rows.c"
#include "cpu/device.c"
#ifndef TE_NO_CUDA
#include "cuda/kernels.c"
#ifndef TE_NO_PTX
#include "cuda/ptx.c"
#else
#include "cuda/no_ptx.c"
#endif
#include "cuda/driver.c"
#include "cuda/stream.c"
#include "cuda/nvrtc.c"
#include "cuda/cache.c"
#include "cuda/jit.c"
#include "cuda/queue.c"
#include "cuda/launch.c"
#include "cuda/device.c"
#include "cuda/explain.c"
#else
#include "cuda/none.c"
#endif

/* operations */
#include "ops/check.c"
#include "ops/args.c"
#ifndef TE_NO_CUDA
#include "ops/early.c"
#endif
#include "ops/math/kargs.h"
#include "ops/math/op.c"
#include "ops/math/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/math/cuda.c"
#endif
#include "ops/cast/kargs.h"
#include "ops/cast/op.c"
#include "ops/cast/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/cast/cuda.c"
#endif
#include "ops/block/kargs.h"
#include "ops/block/op.c"
#include "ops/mxfp8/kargs.h"
#include "ops/mxfp8/op.c"
#include "ops/mxfp8/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/mxfp8/cuda.c"
#endif
#include "ops/shard/kargs.h"
#include "ops/shard/op.c"
#include "ops/shard/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/shard/cuda.c"
#endif
#include "ops/stats/kargs.h"
#include "ops/stats/op.c"
#include "ops/stats/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/stats/cuda.c"
#endif
#include "ops/nvfp4/arithmetic.h"
#include "ops/nvfp4/kargs.h"
#include "ops/nvfp4/op.c"
#include "ops/nvfp4/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/nvfp4/cuda.c"
#endif
#include "ops/gemm/kargs.h"
#include "ops/gemm/op.c"
#include "ops/gemm/quantize.c"
#include "ops/gemm/grouped_op.c"
#include "ops/gemm/cpu.c"
#include "ops/gemm/grouped_cpu.c"
#ifndef TE_NO_CUDA
#include "ops/gemm/choice.c"
#include "ops/gemm/arguments.c"
#include "ops/gemm/cuda.c"
#endif
#include "ops/norm/kargs.h"
#include "ops/norm/op.c"
#include "ops/norm/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/norm/cuda.c"
#endif
#include "ops/norm/l2normalize.c"
#include "ops/act/kargs.h"
#include "ops/act/list.h"
#include "ops/act/op.c"
#include "ops/act/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/act/cuda.c"
#endif
#include "ops/rope/kargs.h"
#include "ops/rope/op.c"
#include "ops/rope/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/rope/cuda.c"
#endif
#include "ops/joint/op.c"
#include "ops/joint/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/joint/cuda.c"
#endif
#include "ops/attn/kargs.h"
#include "ops/attn/sequence.h"
#include "ops/attn/tanh.h"
#include "ops/attn/score_mod.c"
#include "ops/attn/op.c"
#include "ops/attn/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/attn/choice.c"
#include "ops/attn/hopper.c"
#include "ops/attn/cuda.c"
#endif
#include "ops/attn/sparse_op.c"
#include "ops/attn/sparse_cpu.c"
#ifndef TE_NO_CUDA
#include "ops/attn/sparse_cuda.c"
#endif
#include "ops/kv/kargs.h"
#include "ops/kv/op.c"
#include "ops/kv/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/kv/cuda.c"
#endif
#ifndef TE_NO_DIST
#include "ops/context/kargs.h"
#include "ops/context/op.c"
#include "ops/context/cpu.c"
#endif
#if !defined(TE_NO_DIST) && !defined(TE_NO_CUDA)
#include "ops/context/cuda.c"
#endif
#include "ops/softmax/kargs.h"
#include "ops/softmax/op.c"
#include "ops/softmax/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/softmax/cuda.c"
#endif
#include "ops/dropout/kargs.h"
#include "ops/dropout/op.c"
#include "ops/dropout/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/dropout/cuda.c"
#endif
#include "ops/loss/kargs.h"
#include "ops/loss/op.c"
#include "ops/loss/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/loss/cuda.c"
#endif
#include "ops/optim/arithmetic.h"
#include "ops/optim/kargs.h"
#include "ops/optim/op.c"
#include "ops/optim/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/optim/cuda.c"
#endif
#if !defined(TE_NO_MOE) || !defined(TE_NO_DIST)
#include "ops/moe/kargs.h"
#include "ops/moe/op.c"
#include "ops/moe/cpu.c"
#include "ops/moe/router_cpu.c"
#endif
#if (!defined(TE_NO_MOE) || !defined(TE_NO_DIST)) && !defined(TE_NO_CUDA)
#include "ops/moe/cuda.c"
#endif
#include "ops/softcap/kargs.h"
#include "ops/softcap/op.c"
#include "ops/softcap/cpu.c"
#ifndef TE_NO_CUDA
#include "ops/softcap/cuda.c"
#endif
#include "ops/record.c"
#include "ops/table.c"

/* tape: what a context remembers of operations: gradients, random states, graphs */
#include "tape/deferred.c"
#include "tape/graph.c"
#include "tape/random.c"
#include "tape/values.c"
#include "tape/saved.c"
#include "tape/offload.c"
#include "tape/tape.c"
#include "tape/access.c"

/* dist: groups of ranks */
#ifndef TE_NO_DIST
#include "dist/launcher.c"
#include "dist/wire.c"
#include "dist/server.c"
#include "dist/store.c"
#include "dist/group.c"
#include "dist/calls.c"
#include "dist/collectives.c"
#include "dist/flight.c"
#include "dist/hub.c"
#include "dist/threads.c"
#include "dist/libnccl.c"
#include "dist/nccl.c"
#include "dist/processes.c"
#include "dist/layout.c"
#else
#include "dist/none.c"
#endif

/* what is built from operations */
/* gcc compiles the parts below at -O1: this takes less time, and they have no CPU kernels. All parts above keep the
 * program's compiler options, because they have the CPU kernels and the small functions that the kernels call. gcc does
 * not inline a function into a function with other options. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__OPTIMIZE__) && !defined(__OPTIMIZE_SIZE__)
#pragma GCC push_options
#pragma GCC optimize("O1", "strict-aliasing")
#define TE__OPTIONS_PUSHED
#endif
#include "quant/kinds.h"
#ifndef TE_NO_MOE
#include "quant/groups.c"
#else
#include "quant/no_groups.c"
#endif
#include "quant/kind_tensor.c"
#include "quant/kind_block.c"
#include "quant/kind_mxfp8.c"
#include "quant/kind_nvfp4.c"
#include "quant/kind_identity.c"
#include "quant/kind_custom.c"
#include "quant/kind_hybrid.c"
#include "quant/kinds.c"
#include "quant/form.c"
#include "quant/copies.c"
#include "quant/quantizer.c"
#include "quant/product.c"
#include "quant/recipe.c"
#include "quant/scaling.c"
#include "quant/autocast.c"
#include "quant/snapshot.c"
#include "quant/inspect.c"
#include "quant/primary.c"
#include "quant/master.c"
#include "quant/room.c"
#include "functions/elements.c"
#include "functions/activations.c"
#include "functions/softmax.c"
#include "functions/attention.c"
#include "functions/sparse_attention.c"
#include "functions/capped.c"
#include "functions/parallel.c"
#include "functions/pieces.c"
#include "functions/shared_input.c"
#include "functions/state.c"
#include "functions/joint.c"
#include "functions/linear_backward.c"
#include "functions/linear.c"
#ifndef TE_NO_DIST
#include "context_parallel/exchange.c"
#include "context_parallel/attention.c"
#include "context_parallel/batch.c"
#else
#include "context_parallel/none.c"
#endif
#include "modules/module.c"
#include "modules/recompute.c"
#include "modules/options.c"
#include "modules/forward.c"
#include "modules/graphed.c"
#include "modules/parameters.c"
#include "modules/step.c"
#include "modules/facts.c"
#include "nn/layers.c"
#include "nn/mlp.c"
#include "nn/sequential.c"
#include "nn/inference.c"
#include "nn/fp8_attention.c"
#ifndef TE_NO_DIST
#include "nn/fp8_context.c"
#endif
#include "nn/fp8_core.c"
#include "nn/core_attention.c"
#include "nn/transformer.c"
#include "nn/joint.c"
#include "nn/gated_mlp.c"
#include "io/json.c"
#include "io/safetensors.c"
#if !defined(TE_NO_LM) || !defined(TE_NO_LORA)
#include "io/folder.c"
#endif
#if !defined(TE_NO_LM) || !defined(TE_NO_AUTOMODEL)
#include "io/config_keys.c"
#include "io/rope_keys.c"
#endif
#include "train/shards.c"
#include "train/states.c"
#include "train/groups.c"
#include "train/initialize.c"
#include "train/publish.c"
#include "train/optimizer.c"
#include "train/adam.c"
#include "train/sgd.c"
#include "train/multi_tensor.c"
#include "train/scaler.c"
#include "train/checkpoint_files.c"
#include "train/checkpoint_ranks.c"
#include "train/checkpoint_slices.c"
#include "train/checkpoint_save.c"
#include "train/checkpoint.c"
#ifndef TE_NO_DIST
#include "data_parallel/units.c"
#include "data_parallel/tell.c"
#include "data_parallel/gather.c"
#include "data_parallel/exchange.c"
#include "data_parallel/sharding.c"
#endif

/* moe: mixtures of experts */
#ifndef TE_NO_MOE
#include "moe/permute.c"
#include "moe/router.c"
#include "moe/grouped.c"
#include "moe/grouped_linear.c"
#include "moe/padding.c"
#include "moe/gate.c"
#include "moe/experts.c"
#include "moe/dispatch.c"
#include "moe/grouped_experts.c"
#include "moe/expert_files.c"
#include "moe/moe.c"
#include "moe/block.c"
#endif

/* lm: language models that exist */
#ifndef TE_NO_LM
#include "lm/families.c"
#include "lm/config.c"
#include "lm/kv_cache.c"
#include "lm/decoder.c"
#include "lm/causal_lm.c"
#include "lm/names.c"
#include "lm/folder.c"
#include "lm/units.c"
#include "lm/hf.c"
#endif

/* lora: adapters */
#ifndef TE_NO_LORA
#include "lora/match.c"
#include "lora/values.c"
#ifndef TE_NO_MOE
#include "lora/experts.c"
#else
#include "lora/no_experts.c"
#endif
#include "lora/lora.c"
#include "lora/dora.c"
#include "lora/adapters.c"
#include "lora/trained.c"
#include "lora/apply.c"
#include "lora/merge.c"
#include "lora/files.c"
#include "lora/load.c"
#endif

/* model: the layer of NeMo Automodel */
#ifndef TE_NO_AUTOMODEL
#include "model/state.h"
#include "model/patches.c"
#include "model/recast.c"
#include "model/formats.c"
#include "model/snapshots.c"
#include "model/frozen.c"
#include "model/lm_head.c"
#include "model/backend_text.c"
#include "model/backend.c"
#include "model/backend_modules.c"
#include "model/rope_config.c"
#include "model/sdpa.c"
#include "model/block_mask.c"
#include "model/eager.c"
#include "model/attention.c"
#include "model/inject.c"
#endif
#if !defined(TE_NO_AUTOMODEL) && !defined(TE_NO_MOE)
#include "model/moe_backend.c"
#endif

/* onnx: modules as files */
#ifndef TE_NO_ONNX
#include "onnx/proto.c"
#include "onnx/graph.c"
#include "onnx/memory.c"
#include "onnx/quant.c"
#include "onnx/ops.c"
#include "onnx/attn.c"
#ifndef TE_NO_MOE
#include "onnx/moe.c"
#endif
#include "onnx/export.c"
#endif

#include "report.c"
#include "open.c"
#ifdef TE__OPTIONS_PUSHED
#pragma GCC pop_options
#undef TE__OPTIONS_PUSHED
#endif
#if defined(TE__LEFT_OUT) && defined(__GNUC__)
#pragma GCC diagnostic pop
#elif defined(TE__LEFT_OUT) && defined(_MSC_VER)
#pragma warning(pop)
#endif
#undef TE__LEFT_OUT

#endif /* TE_IMPLEMENTATION */
