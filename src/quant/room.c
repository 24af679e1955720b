/* quant/room.c: te__quant_room has the state of quantization in a context, and the functions that a context calls at
 * certain events. */

/* Sets up amax_words. Their memory exists as long as the context. */
static void te__quant_open(te_ctx *te) {
    te__quant_state *s = te__quant_of(te);
    int i;
    for (i = 0; i < TE__AMAX_WORDS; i++) {
        te__amax_word *w = &s->amax_words[i];
        w->buffer.te = w->pair.te = te;
        w->buffer.refs = w->pair.refs = 1;
        w->buffer.data = te->device->word ? te->device->word(te, i) : (void *)&s->amax_memory[i];
        w->buffer.bytes = sizeof(s->amax_memory[i]);
        w->buffer.version = 1;
        w->pair.dtype = TE_F32;
        w->pair.ndim = 1;
        w->pair.shape[0] = 2;
        w->pair.stride[0] = 1;
        w->pair.buffer = &w->buffer;
        w->amax = w->pair;
        w->amax.shape[0] = 1;
    }
}

static te_result te__quant_capture(te_ctx *te, bool begins) {
    if (te__quant_of(te)->num_autocast == 0) return TE_OK;
    return te__fail(te, TE_ERR_STATE,
                    begins ? "te_graph_begin: inside an autocast region, whose end updates scales: begin and end the "
                             "region inside the capture"
                           : "te_graph_end: inside an autocast region; te_autocast_end, which updates scales, belongs "
                             "to the capture");
}

static const te__room te__quant_room = {&te__quant_slot,     te__quant_open,       NULL, te__quant_capture,
                                        te__scales_keep,     te__scales_give_back, te__snapshot_note_leaf,
                                        NULL,                te__update_backward_slots, NULL, NULL,
                                        NULL,                NULL};
