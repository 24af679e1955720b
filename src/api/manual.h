/* te.h: NVIDIA TransformerEngine in one C header
 * ==============================================
 *
 * te.h builds and trains transformers in FP8 and FP4, from C or C++. On a machine with an NVIDIA driver it runs its own
 * CUDA kernels; on any other it runs the same models on the CPU. It needs no CUDA toolkit, no cuBLAS, no cuDNN, no
 * Python. MIT licence.
 *
 *
 * Quick start
 * -----------
 *
 *     #define TE_IMPLEMENTATION
 *     #include "te.h"
 *
 *     int main(void) {
 *         te_ctx *te = te_ctx_create(NULL);           // GPU 0 if there is one, else the CPU
 *         te_module *layer = te_transformer_layer_create(te, &(te_transformer_layer_desc){
 *             .hidden_size = 1024, .ffn_hidden_size = 2816, .attention.num_attention_heads = 16,
 *             .attention.num_gqa_groups = 4,
 *             .norm.normalization = TE_RMSNORM, .activation = TE_SWIGLU, .gemm.no_bias = true });
 *         te_optimizer *adam = te_fused_adam_create(te, layer, &(te_fused_adam_desc){ .lr = 3e-4f });
 *         te_recipe recipe = te_recipe_current_scaling();
 *
 *         for (int step = 0; step < 100; step++) {
 *             te_scope_begin(te);                     // tensors made from here on die at te_scope_end
 *             te_tensor *x = te_tensor_normal(te, TE_BF16, 3, (int64_t[]){ 128, 2, 1024 }, 0, 1);
 *             te_autocast_begin(te, &(te_autocast_desc){ .recipe = &recipe });
 *             te_tensor *y = te_forward(layer, x);    // its products run in FP8
 *             te_autocast_end(te);
 *             te_tensor *loss = te_mse_loss(y, x);
 *             te_backward(loss);
 *             te_optimizer_step(adam);
 *             printf("%d %f\n", step, te_tensor_item(loss));
 *             te_scope_end(te);
 *         }
 *         if (!te_ok(te)) fprintf(stderr, "%s\n", te_error(te));
 *         te_optimizer_destroy(adam);
 *         te_module_destroy(layer);
 *         te_ctx_destroy(te);
 *     }
 *
 *
 * A model is a module of modules. te_sequential_create runs its modules in order; any other model is a class of your
 * own (te_module_class: a forward function).
 *
 *     te_module *model = te_sequential_create(te, (te_module *[]){
 *         te_embedding_create(te, &(te_embedding_desc){ .num_embeddings = 256, .embedding_dim = 1024 }),
 *         te_transformer_layer_create(te, &layer_desc),
 *         te_transformer_layer_create(te, &layer_desc),
 *         te_rmsnorm_create(te, &(te_norm_desc){ .hidden_size = 1024 }),
 *         te_linear_create(te, &(te_linear_desc){ .in_features = 1024, .out_features = 256, .gemm.no_bias = true }) },
 *         5);
 *     te_tensor *logits = te_forward(model, ids);     // optimizers, checkpoints, te_module_print ... take `model`
 *
 *
 * Build
 * -----
 *
 * Exactly one file of a program defines TE_IMPLEMENTATION before it includes te.h; the others include it plainly.
 *
 *     C        cc -std=c11 -O3 main.c -lm -ldl -pthread
 *     C++      c++ -std=c++17 -O3 main.cpp -ldl -pthread      descs may also be passed by reference
 *     CMake    find_package(Threads)
 *              target_link_libraries(app m ${CMAKE_DL_LIBS} Threads::Threads)
 *
 * The header alone is C99 and C++11, the implementation C11 and C++17. TE_STATIC makes every function private to the
 * including file, which then defines TE_IMPLEMENTATION too. -O3 makes the CPU backend two to three times as fast as
 * -O2. gcc with -Wall needs -Wno-misleading-indentation for that file: gcc 12 takes 14 seconds for this warning in a C
 * file of this length.
 *
 * Libraries are opened at run time: libcuda (the driver) for GPUs, libnvrtc (CUDA 12.0 or newer) to compile kernels for
 * the GPU at hand. Without libnvrtc the driver compiles the simpler kernels that are embedded as PTX.
 *
 * Quantized codes are the same bytes on every machine, so the implementation refuses -ffast-math: give the file that
 * defines TE_IMPLEMENTATION -fno-fast-math as its last flag. If the process flushes subnormals, has another rounding
 * mode or traps floating-point exceptions, operations switch that off on the caller's thread while they run. 32-bit x86
 * needs -msse2 -mfpmath=sse: without these flags the compiler keeps numbers wider than their type, and some codes of
 * the CPU backend differ (te_report tells). On 32-bit Linux, files of 2 GiB and more need -D_FILE_OFFSET_BITS=64.
 * Windows: MSVC, clang or MinGW, 32 or 64 bits; te.h may be included before or after windows.h.
 *
 *
 * Rules that hold everywhere
 * --------------------------
 *
 * - The caller zero-initialises structs called ..._desc and ..._args. A zero field has the default that its comment
 *   names ("Options").
 * - The context keeps the first error until te_clear_error. A function that makes a tensor returns NULL on failure. A
 *   function that is given a NULL tensor reports nothing. So it is enough to check te_ok once a step.
 * - Functions that the program passes in and that return a te_result return TE_OK or an error's code. Any other number
 *   counts as TE_ERR_INVALID.
 * - A pointer is owned (the receiver releases it), borrowed (valid as long as its owner is), retained (te.h keeps a
 *   reference) or an alias (it names the same memory). Tensors belong to the innermost scope.
 * - te.h prints nothing but warnings, through the log function (default: stderr), and never exits or aborts.
 * - Work on CUDA is queued. Functions that wait for it say "Syncs".
 * - A reference is released as often as it was taken. A module, optimizer or context is destroyed once. One release too
 *   many is not detected.
 * - A context does not outlive fork(): neither its worker threads nor a GPU's context exist in the child. In the child
 *   every call on the context gives TE_ERR_STATE; destroying it works. Create contexts after fork. A child of a process
 *   that has opened a GPU cannot open one: fork before, or start a new program.
 * - The same program gives the same bits again on the same device.
 *
 *
 * Options
 * -------
 *
 * Names are TransformerEngine's, and zero is always the default. A choice between on and off is one of
 *
 *     bool NAME          where the default is off
 *     bool no_NAME       where the default is on: .no_bias = true is TransformerEngine's bias=False (.disabled where
 *                        the whole is off)
 *     te_switch NAME     where the default depends on something else: TE_DEFAULT (0: the default that the field's
 *                        comment names), TE_ON or TE_OFF
 *
 * Options that several modules have stand in groups, structs that each desc embeds: .gemm, .norm, .attention,
 * .parallel. Options of one kind of recipe or quantizer stand in the group of that kind. An option that is set
 * although the recipe or quantizer is of another kind is an error; it is not ignored.
 *
 *
 * Wings
 * -----
 *
 * A project can leave out parts of te.h by macros, which it sets for every file that includes te.h. Functions of a part
 * that is left out are not declared; no macro changes a public struct or enum. An option that asks for something that
 * is left out gives TE_ERR_UNSUPPORTED, and the error names the macro. A file that calls a function which the file
 * with the implementation leaves out does not link.
 *
 *     TE_NO_AUTOMODEL  the layer of NeMo Automodel: backend, attention_backends, inject, patches, formats, moe_backend
 *     TE_NO_LORA       lora
 *     TE_NO_LM         models: language models that exist, and their folders
 *     TE_NO_ONNX       onnx
 *     TE_NO_MOE        moe, experts, ops_moe: routers, GroupedLinear, gates, experts. Families with experts are refused
 *                      by name. ops_moe stays without TE_NO_DIST: ranks that share sequences move rows by it
 *     TE_NO_DIST       dist, context_parallel, sharding: groups, and all parallel forms
 *     TE_NO_CUDA       the driver, kernels and their text: the CPU backend alone
 *     TE_NO_PTX        the embedded PTX: without NVRTC and without a cache a GPU has no kernels then
 *
 * The cost of each, with the macro set alone: KB of .text and of the object file, seconds of the processor to compile
 * (gcc 12 and clang 14, -O2, x86-64; the mean of two medians of five), KB of embedded kernel text (`make wings`):
 *
 *     left out              gcc: .text object seconds   clang: .text object seconds   kernels
 *     nothing                 1007   4369    27.9     1385   4843    39.7      1092
 *     TE_NO_AUTOMODEL          939   4219    27.0     1289   4648    34.4      1092
 *     TE_NO_LORA               959   4271    27.4     1312   4704    35.5      1092
 *     TE_NO_LM                 972   4289    27.4     1334   4736    36.7      1092
 *     TE_NO_ONNX               946   4256    27.2     1287   4680    36.7      1092
 *     TE_NO_MOE                928   4227    26.4     1255   4633    37.5      1092
 *     TE_NO_DIST               951   4261    27.6     1289   4678    36.3      1092
 *     TE_NO_CUDA               860   1702    24.2     1214   2188    33.6         0
 *     TE_NO_PTX               1005   3540    27.9     1382   4017    37.7      1092
 *     all but the last two     642   3638    19.1      825   3834    23.5      1092
 *     all                      503    984    13.8      665   1196    18.7         0
 *
 *
 * Defaults that are not TransformerEngine's
 * -----------------------------------------
 *
 * Zero means something else here than TransformerEngine's own default (in brackets) in these fields:
 *
 *     params_dtype of te_gemm_options, te_norm_desc, te_bias_desc, te_embedding_desc   bf16 (torch's default: f32)
 *     te_embedding_desc.init                      N(0, 0.023^2) (torch: N(0, 1))
 *     te_attn_options.attention_dropout           0 (0.1 in TransformerLayer and MultiheadAttention)
 *     te_transformer_layer_desc.hidden_dropout    0 (0.1)
 *     te_attn_options.no_fuse_qkv_params          one fused weight (separate parameters)
 *     te_attn_options.no_qkv_weight_interleaved   interleaved (without effect there while parameters are separate)
 *     te_attn_call.max_seqlen_q, max_seqlen_kv    of thd: the number of all tokens, no wait (the longest sequence
 *                                                 rounded up to 64; the host waits)
 *     te_cross_entropy_desc.no_reduce_loss        the mean over rows (the loss of each row)
 *     no_master_weights of te_fused_adam_desc, te_fused_sgd_desc   f32 masters (none)
 *     recipe of te_autocast_desc, te_quantized_model_init_desc   delayed scaling (by GPU: MXFP8 for compute
 *                                                 capability 10.0 up to 12.0, current scaling from 12.0 on, else
 *                                                 delayed)
 *     te_autocast_desc.amax_group                 no reduction (all ranks, under delayed scaling)
 *     te_cp_batch.format, cp_group                TE_SBHD, one rank ("thd", all ranks)
 *     te_quantizer_desc.usage                     both copies (needed in Float8BlockQuantizer)
 *
 * te_optimizer_step drops the gradients after the step; te_optimizer_keep_grad keeps them (TransformerEngine leaves
 * them to zero_grad). Options that TransformerEngine reads from NVTE_ variables have the value without the variable.
 * Differences from NeMo Automodel are said at the fields of its layer; those named rules_of_automodel, upstream_... and
 * ignore_dropout give its behaviour.
 *
 *
 * Environment
 * -----------
 *
 *     TE_DEVICE          "cpu", "cuda:0" ...: the device when te_ctx_desc names none
 *     TE_LOG             1 silence, 2 warnings (default), 3 also errors and compiled kernels, 4 everything
 *     TE_THREADS         threads of the CPU backend, at most 64; default: the processors of the machine
 *     TE_CACHE_DIR       folder of compiled kernels; default: $XDG_CACHE_HOME/te, else ~/.cache/te (Windows:
 *                        %LOCALAPPDATA%\te\cache); empty: none (Windows, where no variable is empty:
 *                        te_ctx_desc.no_cubin_cache)
 *     TE_CACHE_READONLY  more folders of compiled kernels, separated as in PATH: searched first, never written
 *     TE_NVRTC_PATH      the NVRTC library, or the folder that holds it; nothing else is tried then
 *     TE_LIBCUDA_PATH    the driver's libcuda, or the folder that holds it; nothing else is tried then
 *     TE_NCCL_PATH       the NCCL library, or the folder that holds it; nothing else is tried then
 *     TE_DIST_PORT, TE_DIST_FILE, TE_DIST_SECRET, TE_DIST_SECRET_FILE
 *                        how processes meet, beside what launchers set: te_nccl_group_create
 *     TE_KERNELS_FILE    read the kernels from this file (te_kernels.cu.inc) in place of the embedded ones
 *     TE_DEBUG_SYNC      1: wait after every kernel, so that an error names the kernel that failed; ranks of a group
 *                        compare each product that they share; starts of sequences and page tables are checked before
 *                        attention is launched
 *     AUTOMODEL_TE_STATS_EVERY  calls of injected attention between two lines of the log about them; default 500, 0 or
 *                        less: no lines. Text that is not a whole number (blanks around it are allowed) is an error
 *                        of the first te_inject_te_attention or te_make_te_sdpa
 *
 * A number out of its range is ignored, with a warning.
 *
 * Without TE_NVRTC_PATH and TE_NCCL_PATH, libnvrtc and libnccl are also searched for in the folders that CUDA_HOME,
 * CUDA_PATH, CUDA_ROOT, VIRTUAL_ENV, CONDA_PREFIX and PATH name.
 *
 *
 * Shape letters
 * -------------
 *
 *     s  sequence (s_q, s_kv of queries, of keys)      H  attention heads          M, N, K  sizes of a product
 *     b  batch                                         G  groups of keys (GQA)     V        vocabulary
 *     h  hidden size                                   d  size of a head           [..]     any leading sizes
 *
 * The last size varies fastest. Sizes may be odd, and zero.
 *
 *
 * Chapters
 * --------
 *
 *     enums       the choices that host and kernels both know
 *     base        version, linkage, number formats, results
 *     context     device, stream, memory, error, log, random state, scopes
 *     tensor      making, viewing, copying, reading
 *     autograd    the tape
 *     ops         raw operations with explicit outputs: the rules that all share. ops_quant has the operations that
 *                 quantize, ops_moe those of experts, ops_model those of models, ops_train losses and optimizers
 *     trace       a hook that is called before and after every operation
 *     dist        groups of ranks that compute together
 *     quant       quantizers, recipes, autocast, inspection, quantized weights
 *     options     groups of options that several modules have
 *     functions   differentiable functions
 *     attention_keys  attention that looks at some of the keys: block masks, lists of keys
 *     module      the module tree
 *     backends    the implementations that parts of a model choose among
 *     step        the place of a call in a training step
 *     nn          Linear ... TransformerLayer, Sequential
 *     inference   decoding: caches of the keys and values of earlier calls, plain and paged
 *     context_parallel  batches for ranks that share sequences
 *     moe         mixtures of experts
 *     train       optimizers, checkpoints
 *     optimizer_states  the states of FusedAdam, and the function that makes them
 *     graph       a step captured once and launched again and again
 *     io          safetensors
 *     models      published language models of the Llama kind, and their folders
 *     onnx        modules as ONNX files
 *     backend     which implementation each part of a model uses (NeMo Automodel)
 *     inject      DotProductAttention put into a model that was built without it (NeMo Automodel)
 *     patches     changes to the library's functions while a program runs (NeMo Automodel)
 *     formats     number formats of whole models: casts, what stays in f32, logits (NeMo Automodel)
 *     lora        adapters beside frozen weights (NeMo Automodel)
 *     sharding    data parallelism: when ranks exchange gradients (NeMo Automodel)
 *     attention_backends   attention by the chosen backend, and the masks that it keeps (NeMo Automodel)
 *     experts     mixtures of experts: gates, experts of one or more ranks
 *     moe_backend a mixture whose parts a backend chooses (NeMo Automodel)
 *     report      warm-up, explanations of calls, the report on machine and context
 */
