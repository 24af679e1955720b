/* api/onnx.h: exports modules as ONNX files. */

/* Writes an ONNX file (opset 19) that computes a forward pass of `module` on `inputs`. The module runs three times
 * without recording (te_no_grad_begin): twice at the sizes of `inputs` and once at larger ones. Modules of the user are
 * exported too, if operations of te.h make their outputs. Only the shapes and formats of `inputs` matter. Random
 * states, and the scales and histories of recipes, stay as they were. A hook of te_set_trace sees none of the runs.
 *
 *     inputs      each tensor in the args (input, encoder_output, key, value, masks, biases, rotary->start_positions,
 *                 m_splits_tensor and so on) becomes an input of the graph with the field's name. Other fields, also
 *                 rotary's angles, become constants. m_splits, kv_cache and inference_params are refused
 *     sizes       the batch and the lengths may vary, under the names "batch", "sequence" and, with encoder_output, key
 *                 or kv_layer, "sequence_kv". They are the first two dimensions of hidden states, in the module's
 *                 order; if hidden states have 2 dimensions, the first is "batch". All other sizes are fixed. A
 *                 dimension of size 1 of a mask or bias is fixed and broadcasts, except the batch of a padding mask [b,
 *                 1, 1, s]. A size inside the module must be fixed, or a product of sizes that vary. The export refuses
 *                 other sizes, such as a length rounded up. It finds them by comparing the runs, and may miss one if
 *                 sizes are equal by chance. So the batch and the lengths of `inputs` should be different numbers. They
 *                 should also differ from any constant that the module adds to a size, and from the step in which it
 *                 rounds a size up
 *     outputs     "out", and "output_bias", "ln_out", "max_logit", "m_splits", "topk_indices", "aux_loss" if the module
 *                 makes them, in the formats that the module gives them
 *     weights     initializers, named by the paths of the parameters (te_module_visit_tensors), in the formats of the
 *                 parameters
 *     arithmetic  in f32: inputs of an operation are cast to f32, and its result is cast to the operation's format
 *     autocast    between te_autocast_begin and te_autocast_end, recipes with one scale per tensor become
 *                 QuantizeLinear and DequantizeLinear with float8 codes. Under delayed scaling the file has the present
 *                 scales: the module must have run, or loaded its scales. Under current scaling the graph computes the
 *                 scales of activations, and the file has those of weights. Opset 19 cannot express scales of blocks
 *                 (block, MXFP8, NVFP4): weights are decoded from their codes (named "PATH.decoded"), and activations
 *                 are not rounded
 *     stored      weights that are stored quantized become codes with DequantizeLinear; with scales of blocks they are
 *                 decoded
 *     attention   becomes two MatMuls with a softmax between them; positions and masks come from the sizes of the
 *                 inputs
 *
 * The data goes through a temporary file, as in te_safetensors_write. Syncs. TransformerEngine: te.onnx_export with
 * torch.onnx.export.
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
