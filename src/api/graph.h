/* api/graph.h: graphs. A graph is a sequence of calls that is captured once and then launched many times, at the cost
 * of one call.
 *
 *     for (int i = 0; i < 2; i++) step();   // before the capture: step() compiles kernels and makes scales
 *     te_graph_begin(te);
 *     step();                               // captured; nothing runs
 *     te_graph *graph = te_graph_end(te);
 *     for (;;) {
 *         te_tensor_copy_from_host(x, next_batch);    // x: a tensor from before te_graph_begin that step() reads
 *         te_graph_launch(graph);                     // what step() would do now, to the bit
 *         use(te_tensor_item(loss));                  // loss: a tensor that step() made and retained
 *     }
 *     te_graph_destroy(graph);
 *
 * A graph holds the work of the device. A launch repeats it with the same shapes, on the same memory, in the same
 * order. Some host state advances with each launch, as if the calls were made:
 * - the random state; te_seed between two launches takes effect;
 * - an optimizer's number of steps, and its learning rate as te_optimizer_set_lr last set it;
 * - the length of a KV cache (te_kv_cache) that a forward in the graph extends;
 * - the versions of written tensors, by which cached quantized weights and master weights notice a write.
 * All other decisions of the host are made once, in the capture: which modules run, shapes, recipes, te_microbatch,
 * te_module_train, factors and other numbers in args. A number that changes between launches must be in a tensor. Raw
 * operations (te_op_...) read such tensors from the fields `rng`, `lr_device` and `bias_correction` of their args, for
 * example. The user's functions (modules, quantizers, backward functions) do not run again.
 *
 * Memory. Tensors from before the capture stay at the same address. The graph keeps their memory even if they are
 * released. Write new data into them (te_tensor_copy_from_host, te_tensor_copy). Tensors made inside the capture belong
 * to the graph. They are uninitialised until the first launch, and each launch writes them anew. They can be read if
 * they were retained or their scope is still open. Memory released inside the capture can be reused only inside this
 * graph. If a parameter had no gradient before the capture, each launch overwrites its gradient. If it had one, each
 * launch adds to it.
 *
 * Refused inside a capture, with the remedy in the message:
 *   - waiting and reading back (te_synchronize, te_tensor_to_host, te_tensor_item and others);
 *   - copying from host memory;
 *   - creating modules, optimizers and quantizers, or state that they create in their first run (so run the step once
 *     before the capture);
 *   - a forward call with TE_MICROBATCH_LATER whose TE_MICROBATCH_FIRST came before the capture.
 *
 * After an error inside the capture there is no graph: te_graph_end frees everything and returns NULL.
 *
 * On CUDA, no thread may use the legacy default stream of the same CUcontext during a capture. Such use makes the
 * driver end the capture, and te_graph_end then returns NULL with an error.
 *
 * On CUDA, a kernel of the graph may read what no operation of the graph has written, weights say, while the kernels
 * before it still run. So a kernel of your own in the capture must not write tensors that later operations read: let it
 * write a tensor of its own, and copy that (te_tensor_copy).
 *
 * On the CPU a launch runs the operations one by one. The rules and the bits are the same. */

/* Begins a capture: until te_graph_end, calls are recorded and not run. Syncs.
 * TE_ERR_STATE inside a capture, a region of te_warmup_begin or an autocast region; TE_ERR_LIBRARY if the driver has no
 * graphs. */
TE_API te_result te_graph_begin(te_ctx *te);
/* Ends the capture. Returns the graph, which the caller owns and must release with te_graph_destroy. The random state
 * and optimizers are then as they were at te_graph_begin. Returns NULL, with the error, if any call inside was refused
 * or te_graph_begin failed. */
TE_API te_graph *te_graph_end(te_ctx *te);
/* Runs the graph once, on the context's stream. Asynchronous on CUDA. TE_ERR_STATE inside a capture, or if an optimizer
 * whose step is in the graph was destroyed, or a KV cache that the graph extends. */
TE_API te_result te_graph_launch(te_graph *graph);
/* Frees the graph, and its memory that no tensor holds. Syncs. `graph` may be NULL. After te_ctx_destroy, a graph still
 * needs this call, and allows no other. */
TE_API void te_graph_destroy(te_graph *graph);

/* Options of te_make_graphed_callables. */
typedef struct te_graphed_desc {
    int num_warmup_iters;             /* number of passes before the capture, which compile kernels and make scales of
                                       * delayed recipes; their other effects are undone; 0 => 3 */
    const te_autocast_desc *autocast; /* autocast region around each forward pass (borrowed for the call); NULL =>
                                       * none */
} te_graphed_desc;
/* Captures the forward pass and the backward pass of each module as two graphs, on copies of the tensors in its
 * sample_args. From then on, te_forward of the module in training copies the call's tensors and launches the forward
 * graph. te_backward launches the backward graph. Other work may run in between. The results have the same bits as
 * without graphs.
 *
 * A call must have the shapes, formats and options of the sample. The autocast region of desc->autocast is part of the
 * graphs, so the call needs no region. If it is in a region, that region must have the options of desc->autocast. An
 * input gets a gradient if its tensor in the sample required one.
 * The module runs without its graphs in evaluation, with gradients disabled, under te_checkpoint and in other captures.
 * The graphs keep the activations of one call, so its te_backward must come before the next te_forward.
 * A call gives TE_ERR_STATE if te_step_set_is_first_microbatch has set another value than at the capture.
 * A call gives TE_ERR_STATE if a parameter that was frozen at the capture now requires a gradient.
 *
 * te_make_graphed_callables syncs. On failure no module gets graphs.
 * TE_ERR_STATE while a forward pass waits for its te_backward.
 * TE_ERR_UNSUPPORTED for a module with more than 1,000 parameters that require gradients.
 * TE_ERR_UNSUPPORTED with delay_wgrad_compute, for parameters that are sharded themselves (TE_SHARD_PARAMETERS), and
 * for a module that draws random numbers under te_module_set_checkpoint.
 * TE_ERR_INVALID for a module that is given twice.
 * Source: transformer_engine.pytorch.make_graphed_callables. */
TE_API te_result te_make_graphed_callables(te_ctx *te, te_module *const *modules, const te_forward_args *sample_args,
                                           int n, const te_graphed_desc *desc);
/* Removes the graphs of m, as te_module_destroy also does. m may be NULL. */
TE_API void te_graphed_reset(te_module *m);
