/* api/onnx.h: exports modules as ONNX files. */

/* Writes an ONNX file (opset 19) that computes the same as a forward pass of `module` on `inputs`; any ONNX runtime can
 * read it. The module runs three times without recording (te_no_grad_begin): twice at the sizes of `inputs` and once at
 * larger ones. Every operation of the module becomes nodes of the graph, so modules of the user are exported too, if
 * operations of te.h make their outputs. Small inputs are enough: only their shapes and formats matter, and their
 * values are not written. Random states, and the scales and histories of recipes, stay as they were. A hook of
 * te_set_trace sees none of the runs.
 *
 *     inputs      each tensor in the args (input, encoder_output, key, value, masks, biases, rotary->start_positions,
 *                 m_splits_tensor and so on) becomes an input of the graph with the field's name. All other fields of
 *                 the args, also rotary's angles, become constants of the file. m_splits, kv_cache and inference_params
 *                 are refused, because they are in host memory
 *     sizes       the batch and the lengths may vary, under the names "batch", "sequence" and, with encoder_output, key
 *                 or kv_layer, "sequence_kv". They are the first two dimensions of hidden states, in the module's
 *                 order; if hidden states have 2 dimensions, the first is "batch". All other sizes are fixed. A
 *                 dimension of size 1 of a mask or bias is fixed too and broadcasts. Exception: the first dimension of
 *                 a padding mask [b, 1, 1, s] is the batch, even if it is 1. A size inside the module must be fixed, or
 *                 a product of sizes that vary. The export cannot always detect that the module rounds a size up or
 *                 adds a number to it. So the batch and the lengths should differ from each other, and from the
 *                 numbers that the module adds or rounds to
 *     outputs     "out", and "output_bias", "ln_out", "max_logit", "m_splits", "topk_indices", "aux_loss" if the module
 *                 makes them, in the formats that the module gives them
 *     weights     initializers, named by the paths of the parameters (te_module_visit_tensors), in the formats of the
 *                 parameters; each is written once
 *     arithmetic  in f32: inputs of an operation are cast to f32, and its result is cast to the operation's format
 *     autocast    between te_autocast_begin and te_autocast_end, recipes with one scale per tensor become
 *                 QuantizeLinear and DequantizeLinear with float8 codes. Under delayed scaling the file has the present
 *                 scales, so the module must have run, or have loaded its scales, before. Under current scaling the
 *                 graph computes the scales of activations, and the file has the scales of weights. This opset cannot
 *                 express recipes with scales of blocks (block, MXFP8, NVFP4): their weights are decoded from their
 *                 codes (named "PATH.decoded"), and activations are not rounded to codes
 *     stored      weights that are stored quantized become codes with DequantizeLinear; if their scales are of blocks,
 *                 they are decoded
 *     attention   becomes two MatMuls with a softmax between them; the graph computes positions and masks from the
 *                 sizes of its inputs
 *
 * The data is written to a temporary file in the same folder. This file is renamed when it is complete, as by
 * te_safetensors_write. Syncs. TransformerEngine: te.onnx_export with torch.onnx.export.
 *
 *     TE_ERR_UNSUPPORTED  - an operation that ONNX cannot express (the message names it and its module): dropout
 *                           (te_module_train(m, false) turns it off), packed sequences (thd), KV caches, score_mod, the
 *                           expert choice of a Gate module, experts whose token counts are read by the host, an
 *                           operation that writes a list of tensors
 *                         - a size that is not a product of the sizes that vary
 *                         - a module that is sharded over ranks; an autocast region with an amax_group of several ranks
 *                         - a file above 2 GB, which readers of protobuf refuse
 *     TE_ERR_INVALID      - inputs, inputs->input or path is NULL
 *                         - an input is quantized, empty or of another context
 *                         - sizes of inputs contradict each other
 *     TE_ERR_STATE        - module is NULL
 *                         - a module under delayed scaling has no scales
 *                         - the call is inside a capture, a warm-up or a trace hook
 *     TE_ERR_IO           - the path cannot be written */
TE_API te_result te_onnx_export(te_module *module, const te_forward_args *inputs, const char *path);
