/* api/onnx.h: modules as ONNX files. */

/* Writes what a forward pass of `module` on `inputs` computes as an ONNX file (opset 19), which any runtime of ONNX
 * takes. The module runs three times without recording (te_no_grad_begin), twice at the sizes of `inputs` and once at
 * larger ones, and every operation that it runs becomes nodes. So modules of the user's own are exported too, as long
 * as operations of te.h make their outputs. Small inputs are enough: they show shapes and formats, and their values are
 * not written. Random states and the scales and histories of recipes stay as they were, and a hook of te_set_trace sees
 * none of the runs.
 *
 *     inputs      each tensor of the args (input, encoder_output, key, value, masks, biases, rotary->start_positions,
 *                 m_splits_tensor ...) becomes an input of the graph and has the field's name there. All other fields
 *                 of the args, rotary's angles too, become constants of the file. Refused: m_splits, kv_cache and
 * inference_params,
 *                 which live on the host
 *     sizes       a batch and lengths vary, under the names "batch", "sequence" and, with encoder_output, key or
 *                 kv_layer, "sequence_kv". Hidden states have both in front, in the module's order; if they have 2
 *                 dimensions, the first is "batch". All other sizes are fixed. An axis of size 1 of a mask or bias is
 *                 fixed too and broadcasts; but the first axis of a padding mask [b, 1, 1, s] is the batch, even of
 *                 one sequence. A size inside the module is fixed, or a product of sizes that vary. A size that the
 *                 module rounds up, or adds to, is neither of these, and may look like either: give a batch and
 *                 lengths that differ from each other, and from the numbers that the module adds or rounds to
 *     outputs     "out", and "output_bias", "ln_out", "max_logit", "m_splits", "topk_indices", "aux_loss" where the
 *                 module makes them, in the formats that it makes them in
 *     weights     initializers under the parameters' paths (te_module_visit_tensors), in their formats, each once
 *     arithmetic  f32: inputs of an operation are cast to f32, and a cast rounds the result to the operation's format
 *     autocast    inside te_autocast_begin .. _end, recipes with one scale a tensor become QuantizeLinear and
 *                 DequantizeLinear with float8 codes. Under delayed scaling the file has the present scale, so the
 *                 module must have run, or have loaded its scales, before. Under current scaling the graph computes
 *                 the scale of an activation, and the file has the scale of a weight. Recipes with scales of blocks
 *                 (block, MXFP8, NVFP4) have no form in this opset: their weights are decoded from their codes
 *                 (".decoded"), and activations are not rounded to codes
 *     stored      weights that are stored quantized: codes with DequantizeLinear, or decoded if their scales are of
 *                 blocks
 *     attention   its two products and the softmax between them; the graph computes positions and masks from the sizes
 *                 of each run
 *
 * The file is written to a temporary file beside its path and renamed when it is whole, as by te_safetensors_write.
 * Syncs. TransformerEngine: te.onnx_export with torch.onnx.export.
 *
 *     TE_ERR_UNSUPPORTED  an operation that has no form in ONNX; the message names it and its module: dropout
 *                         (te_module_train(m, false) ends it), packed sequences (thd), caches, score_mod, the choice of
 *                         a Gate, experts whose tokens the host counts, an operation that writes a list of tensors.
 *                         Sizes that are not products of those that vary. A module that ranks share; an autocast region
 *                         with an amax_group of several ranks. A file above 2 GB, which readers of protobuf refuse
 *     TE_ERR_INVALID      inputs, inputs->input or path is NULL; an input that is quantized, empty or of another
 *                         context; inputs whose sizes contradict each other
 *     TE_ERR_STATE        module is NULL; a module under delayed scaling without scales; inside a capture, a warm-up or
 *                         a trace hook
 *     TE_ERR_IO           a path that cannot be written */
TE_API te_result te_onnx_export(te_module *module, const te_forward_args *inputs, const char *path);
