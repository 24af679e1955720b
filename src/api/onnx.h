/* api/onnx.h: modules as ONNX files. */

/* Writes what a forward pass of `module` on `inputs` computes as an ONNX file (opset 19), which any runtime of ONNX takes. The module runs twice without recording
 * (te_no_grad_begin), at the sizes of `inputs` and at larger ones, and every operation that it runs becomes nodes: so modules of the user's own are exported too, as long as
 * operations of te.h make their outputs. Small inputs will do; they show shapes and formats, and their values are not written. Random states and the scales and histories of recipes stay
 * as they were, and a hook of te_set_trace sees neither run.
 *
 *     inputs      each tensor of the args (input, encoder_output, key, value, masks, biases, rotary->start_positions, m_splits_tensor ...) becomes an input of the graph
 *                 under the field's name; all other fields are part of the file, as rotary's angles are. Not with m_splits, kv_cache and inference_params, which are the host's
 *     sizes       the leading dimensions of inputs vary: "batch", "sequence", and where encoder_output, key or kv_layer is given "sequence_kv" (of 2 dimensions of
 *                 hidden states the first, "batch"). All others are fixed
 *     outputs     "out", and "output_bias", "ln_out", "max_logit", "m_splits" where the module makes them, in the formats that it makes them in
 *     weights     initializers under the parameters' paths (te_module_visit_tensors), in their formats, each once
 *     arithmetic  f32: inputs of an operation are cast to it, and its result is rounded to its own format by a cast
 *     autocast    inside te_autocast_begin .. _end, recipes with one scale a tensor become QuantizeLinear and DequantizeLinear with float8 codes: with the scale as it
 *                 is under delayed scaling, and under current scaling with that of the tensor, which the graph computes (of a weight: which the file has). So a module
 *                 under delayed scaling must have run, or have loaded its scales, before. Recipes with scales of blocks (block, MXFP8, NVFP4) have no form in this opset: their
 *                 weights are decoded from their codes (".decoded"), and activations are not rounded to codes
 *     stored      weights that are stored quantized: codes with DequantizeLinear, or decoded if their scales are of blocks
 *     attention   its two products and the softmax between them; positions and masks are computed from the sizes that a run has
 *
 * The file is written beside its path and renamed when it is whole, as by te_safetensors_write. Syncs. Errors: TE_ERR_UNSUPPORTED for an operation that has no form in ONNX, and
 * the message names it and its module: dropout (te_module_train(m, false) ends it), packed sequences (thd), caches, score_mod, experts whose tokens the host counts; for sizes that are not
 * products of those that vary; for a file above 2 GB, which readers of protobuf refuse. TE_ERR_INVALID for inputs whose sizes contradict each other. TE_ERR_STATE inside a capture, a warm-up or a
 * trace hook. TE_ERR_IO for a path that cannot be written. TransformerEngine: te.onnx_export with torch.onnx.export. */
TE_API te_result te_onnx_export(te_module *module, const te_forward_args *inputs, const char *path);
