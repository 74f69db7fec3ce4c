/* Normalisation, rotary embedding and the gated activation, a row of tokens at a time. */

/* Elements in a piece of work: fewer are not worth sharing out. */
enum { PIECE = 16384 };

typedef struct {
    pool_work work;
    const void *job;
    int64_t tokens, per_piece;
} TokensJob;

static void tokens_piece(const void *of, int piece, int thread) {
    const TokensJob *job = of;
    int64_t first = piece * job->per_piece, end = first + job->per_piece;
    for (int64_t token = first; token < end && token < job->tokens; token++)
        job->work(job->job, (int)token, thread);
}

/* Does `work` for each of the tokens, of `size` elements each. */
static void for_tokens(int64_t tokens, int64_t size, pool_work work, const void *of) {
    int64_t per_piece = PIECE / (size + 1) + 1;
    TokensJob job = {work, of, tokens, per_piece};
    pool_run((int)((tokens + per_piece - 1) / per_piece), tokens_piece, &job);
}

static void rms_norm_piece(const void *of, int token, int thread) {
    const RMSNorm *n = of;
    const float *x = n->x + token * n->size;
    float *y = n->y + token * n->size;
    vf squares = {0};
    (void)thread;
    int64_t whole = n->size / LANES * LANES;
    int left = (int)(n->size - whole);
    vf last = load_n(x + whole, left);
    for (int64_t i = 0; i < whole; i += LANES)
        squares += load(x + i) * load(x + i);
    squares += last * last;
    vf factor = splat(1.0f / sqrtf(sum_lanes(squares) / (float)n->size + n->eps));
    for (int64_t i = 0; i < whole; i += LANES)
        store(y + i, load(x + i) * factor * load(n->weight + i));
    store_n(y + whole, last * factor * load_n(n->weight + whole, left), left);
}

static int rms_norm(const RMSNorm *n) {
    for_tokens(n->tokens, n->size, rms_norm_piece, n);
    return 1;
}

INLINE vf silu(vf x) { return x / (splat(1.0f) + exp_of(-x)); }

static void swiglu_piece(const void *of, int token, int thread) {
    const SwiGLU *s = of;
    const float *gate = s->x + token * 2 * s->size, *up = gate + s->size;
    float *y = s->y + token * s->size;
    int64_t i = 0;
    (void)thread;
    for (; i + LANES <= s->size; i += LANES)
        store(y + i, silu(load(gate + i)) * load(up + i));
    int left = (int)(s->size - i);
    store_n(y + i, silu(load_n(gate + i, left)) * load_n(up + i, left), left);
}

static int swiglu(const SwiGLU *s) {
    for_tokens(s->tokens, 4 * s->size, swiglu_piece, s);
    return 1;
}

static void rope_piece(const void *of, int token, int thread) {
    const RoPE *r = of;
    const float *cosines = r->table + token * 2 * r->pairs, *sines = cosines + r->pairs;
    (void)thread;
    for (int64_t head = 0; head < r->heads; head++) {
        const float *x = r->x + head * r->head_stride + token * r->token_stride;
        float *y = r->y + (head * r->tokens + token) * r->head_dim;
        for (int64_t i = 0; i < r->pairs; i += LANES) {
            int n = at_most(r->pairs - i, LANES);
            vf cosine = load_n(cosines + i, n), sine = load_n(sines + i, n);
            vf a = load_n(x + i, n), b = load_n(x + r->pairs + i, n);
            store_n(y + i, a * cosine - b * sine, n);
            store_n(y + r->pairs + i, b * cosine + a * sine, n);
        }
        int64_t rest = r->head_dim - 2 * r->pairs;
        memcpy(y + 2 * r->pairs, x + 2 * r->pairs, 4 * (size_t)rest);
    }
}

static void write_piece(const void *of, int token, int thread) {
    const Write *w = of;
    (void)thread;
    for (int64_t head = 0; head < w->heads; head++) {
        const float *x = w->x + head * w->head_stride + token * w->token_stride;
        uint16_t *to = w->to + head * w->to_head_stride + token * w->to_token_stride;
        for (int64_t i = 0; i < w->head_dim; i += LANES)
            store_half(to + i, load(x + i));
    }
}

static int write_rows(const Write *w) {
    for_tokens(w->tokens, w->heads * w->head_dim, write_piece, w);
    return 1;
}

static int rope(const RoPE *r) {
    for_tokens(r->tokens, r->heads * r->head_dim, rope_piece, r);
    return 1;
}
