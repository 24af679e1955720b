/* api/graph.h: graphs: a sequence of calls noted once and launched again and again, at the cost of one call.
 *
 *     for (int i = 0; i < 2; i++) step();   // once or more as usual: kernels get compiled, scales and states made
 *     te_graph_begin(te);
 *     step();                               // noted; nothing runs
 *     te_graph *graph = te_graph_end(te);
 *     for (;;) {
 *         te_tensor_copy_from_host(x, next_batch);    // x: a tensor from before te_graph_begin that step() reads
 *         te_graph_launch(graph);                     // what step() would do now, to the bit
 *         use(te_tensor_item(loss));                  // loss: a tensor that step() made and retained
 *     }
 *     te_graph_destroy(graph);
 *
 * What is noted is the work of the device. A launch does it again with the same shapes, on the same memory, in the same order. Of the host's
 * state these move on with each launch, as if the calls were made: the random state (te_seed between launches counts), an optimizer's count
 * of steps and its learning rate (that of te_optimizer_set_lr at the launch), and what tells quantized copies and masters that weights were written.
 * Everything else that the host decides is decided once: which modules run, shapes, recipes, te_microbatch, te_module_train, factors and
 * other numbers in args (raw operations read what must change from tensors: rng, lr_device, bias_correction). Functions of the user's
 * that ran in between (modules, quantizers, backward functions) do not run again.
 *
 * Memory. Tensors from before stay where they are, and the graph keeps their memory even if they are released: write new data into it
 * (te_tensor_copy_from_host, te_tensor_copy). Tensors made in between are the graph's: uninitialised until the first launch, and
 * written anew by each; those that were retained, or whose scope is still open, can be read. What was released in between is used again inside the
 * graph alone. A parameter that had no gradient gets a new one from each launch; to one that had, each launch adds.
 *
 * Refused in between, with the way out in the message: waiting and reading back (te_synchronize, te_tensor_to_host, te_tensor_item ...);
 * copying from host memory; making modules, optimizers and quantizers, or what they make when they first run: run the step once before;
 * TE_MICROBATCH_LATER whose FIRST is outside. An error in between leaves no graph: te_graph_end gives everything back and returns NULL.
 *
 * On CUDA, while a capture is under way nobody may use the legacy default stream of the same CUcontext (in any thread): the driver then
 * ends the capture, and te_graph_end says so.
 *
 * On the CPU the operations are noted and run again one by one: the same rules, the same bits. */

/* From here to te_graph_end calls are noted in place of being run. Syncs. Errors: TE_ERR_STATE inside a capture, a warm-up or an autocast region;
 * TE_ERR_LIBRARY for a driver without graphs. */
TE_API te_result te_graph_begin(te_ctx *te);
/* The graph, ready to be launched; owned by the caller. The random state and optimizers are as they were at te_graph_begin. NULL with the
 * error if anything was refused in between, and after te_graph_begin failed. */
TE_API te_graph *te_graph_end(te_ctx *te);
/* Runs it once, on the context's stream. Asynchronous on CUDA; no host wait. Errors: TE_ERR_STATE inside a capture, or if an optimizer that it
 * steps was destroyed. */
TE_API te_result te_graph_launch(te_graph *graph);
/* Its memory goes back, as far as no tensor holds it. Syncs. NULL is fine. A context destroys its graphs itself; then they can only be destroyed. */
TE_API void te_graph_destroy(te_graph *graph);
