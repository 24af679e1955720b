/* api/graph.h: graphs: a sequence of calls captured once and launched again and again, at the cost of one call.
 *
 *     for (int i = 0; i < 2; i++) step();   // at least once as usual: it compiles kernels, makes scales and states
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
 * order. Some state of the host advances with each launch, as if the calls were made: the random state (te_seed between
 * launches takes effect), an optimizer's count of steps and its learning rate (as te_optimizer_set_lr left it), and the
 * versions of written tensors, by which cached quantized weights and master weights notice a write. All other decisions
 * of the host are made once, in the capture: which modules run, shapes, recipes, te_microbatch, te_module_train,
 * factors and other numbers in args (raw operations read numbers that must change from tensors: rng, lr_device,
 * bias_correction). The user's functions (modules, quantizers, backward functions) do not run again.
 *
 * Memory. Tensors from before the capture stay where they are, and the graph keeps their memory even if they are
 * released: write new data into them (te_tensor_copy_from_host, te_tensor_copy). Tensors made inside the capture belong
 * to the graph: they are uninitialised until the first launch, and each launch writes them anew. Those that were
 * retained, or whose scope is still open, can be read. Memory released inside the capture is used again inside the
 * graph alone. A parameter that had no gradient before the capture gets a new one from each launch; each launch adds to
 * a gradient that existed before.
 *
 * Refused inside a capture, with the remedy in the message:
 *   - waiting and reading back (te_synchronize, te_tensor_to_host, te_tensor_item ...);
 *   - copying from host memory;
 *   - creating modules, optimizers and quantizers, or state that they create in their first run: run the step once
 *     before;
 *   - a forward call with TE_MICROBATCH_LATER whose TE_MICROBATCH_FIRST came before the capture.
 * After an error inside there is no graph: te_graph_end frees everything and returns NULL.
 *
 * On CUDA, during a capture no thread may use the legacy default stream of the same CUcontext: the driver then ends the
 * capture, and te_graph_end says so.
 *
 * On the CPU the graph keeps the args of each operation and runs the operations one by one: the same rules, the same
 * bits. */

/* Begins a capture: up to te_graph_end calls are recorded and not run. Syncs. Errors: TE_ERR_STATE inside a capture, a
 * warm-up or an autocast region; TE_ERR_LIBRARY for a driver without graphs. */
TE_API te_result te_graph_begin(te_ctx *te);
/* Ends the capture. Returns the graph, owned by the caller: te_graph_destroy. The random state and optimizers are as
 * they were at te_graph_begin.
 * NULL, with the error, if anything was refused inside or te_graph_begin failed. */
TE_API te_graph *te_graph_end(te_ctx *te);
/* Runs the graph once, on the context's stream. Asynchronous on CUDA. Errors: TE_ERR_STATE inside a capture, or if an
 * optimizer that the graph steps was destroyed. */
TE_API te_result te_graph_launch(te_graph *graph);
/* Frees the graph, and that part of its memory which no tensor holds. Syncs. NULL is fine. te_ctx_destroy leaves a
 * graph of the context as a shell that still needs this call and allows no other. */
TE_API void te_graph_destroy(te_graph *graph);

/* Options of te_make_graphed_callables. */
typedef struct te_graphed_desc {
    int num_warmup_iters;             /* passes before the capture, which compile kernels and make states, and are
                                       * undone; 0 => 3 */
    const te_autocast_desc *autocast; /* the region around each forward pass (borrowed for the call); NULL => none */
} te_graphed_desc;
/* Captures each module's forward pass and its backward pass as two graphs, on copies of its sample's tensors. From then
 * on te_forward of a module in training launches the forward graph and te_backward the backward graph, between whatever
 * else the program does. te_forward copies the call's tensors to where the graphs read them. The results have the bits
 * of a run without graphs.
 *
 * Calls must have the shapes, formats and options of the sample, and be outside of autocast regions or in a region like
 * desc->autocast, which the graphs contain. Input gradients are made where the sample's tensors require them. In
 * evaluation, without gradients, inside te_checkpoint and inside other captures the module runs as usual. The
 * activations of one call are kept, so its te_backward must come before the next te_forward. The microbatch that
 * te_step_set_is_first_microbatch had set stays that of the graphs: a call with another microbatch gives TE_ERR_STATE.
 * So does a parameter that requires a gradient at the call and was frozen at the capture.
 *
 * On failure no module is graphed. TE_ERR_STATE while a forward pass waits for its te_backward; TE_ERR_UNSUPPORTED for
 * a module of more than 1,000 parameters with gradients, one that delays weight gradients (delay_wgrad_compute), or one
 * that draws random numbers and runs again (te_module_set_checkpoint); TE_ERR_INVALID for a module that is given twice.
 * Syncs. Source: transformer_engine.pytorch.make_graphed_callables. */
TE_API te_result te_make_graphed_callables(te_ctx *te, te_module *const *modules, const te_forward_args *sample_args,
                                           int n, const te_graphed_desc *desc);
/* Removes the graphs of m; the module runs as usual. te_module_destroy removes them too. NULL is fine. */
TE_API void te_graphed_reset(te_module *m);
