/* Attention on the cache as it lies, with an online softmax (arXiv:1805.02867, arXiv:2205.14135).
 *
 * Keys come in units of up to BLOCK tokens: a tile, or some rows. A row is one query token of one
 * query head; the rows of all heads that share a KV head go together, so that K and V are read and
 * dequantised once for all of them. Where V is alone, K of a unit is written to rows, which stay in
 * a core's cache. */

typedef struct {
    const Span *span;
    int64_t first, position; /* of its tokens: in the span, in the sequence */
    int tokens;
} Unit;

static int64_t count_units(const Attention *a) {
    int64_t n = 0;
    for (int i = 0; i < a->n_spans; i++)
        n += (a->spans[i].tokens + BLOCK - 1) / BLOCK;
    return n;
}

static int64_t count_tokens(const Attention *a) {
    int64_t n = 0;
    for (int i = 0; i < a->n_spans; i++)
        n += a->spans[i].tokens;
    return n;
}

static Unit unit_at(const Attention *a, int64_t index) {
    const Span *span = a->spans;
    int64_t position = 0, n;
    for (; index >= (n = (span->tokens + BLOCK - 1) / BLOCK); span++) {
        index -= n;
        position += span->tokens;
    }
    int64_t first = index * BLOCK;
    return (Unit){span, first, position + first, at_most(span->tokens - first, BLOCK)};
}

/* The keys of a unit that the query token at `position` sees: low to high - 1. */
INLINE int visible(const Attention *a, const Unit *u, int64_t position, int *low, int *high) {
    int64_t from = a->window ? position + 1 - a->window - u->position : 0;
    int64_t to = position + 1 - u->position;
    *low = from > 0 ? (int)(from < BLOCK ? from : BLOCK) : 0;
    *high = to > 0 ? at_most(to, u->tokens) : 0;
    return *low < *high;
}

INLINE void cap_scores(const Attention *a, float *scores, int n) {
    if (a->softcap > 0)
        for (int i = 0; i < n; i += LANES)
            store(scores + i,
                  splat(a->softcap) * tanh_of(load(scores + i) / splat(a->softcap)));
}

INLINE void mask_scores(float *scores, int low, int high) {
    for (int i = 0; i < low; i++)
        scores[i] = -INFINITY;
    for (int i = high; i < BLOCK; i++)
        scores[i] = -INFINITY;
}

/* LANES pairs of k, or the first n of them, turned to a block's start and then to a place in it. */
INLINE void turn_pairs(const Keys *keys, const float *start, const float *place, float *k, int n) {
    vf c0 = load_n(start, n), s0 = load_n(start + keys->pairs, n);
    vf c1 = load_n(place, n), s1 = load_n(place + keys->pairs, n);
    vf cosine = c0 * c1 - s0 * s1, sine = s0 * c1 + c0 * s1;
    vf x = load_n(k, n), y = load_n(k + keys->half, n);
    store_n(k, x * cosine - y * sine, n);
    store_n(k + keys->half, y * cosine + x * sine, n);
}

/* LANES channels of 8 tokens of a tile that holds V alone, times `factor`, to rows `stride` apart. */
INLINE void write_values(const Tile *tile, int64_t dim, int token, int64_t c, vf factor, float *to,
                         int64_t stride) {
    vf scale = load_half(tile->scales + c), base = base_of(tile, scale, load_half(tile->mids + c));
    vu words = load_words(tile->v + token / 8 * dim + c);
    scale *= factor;
    base *= factor;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        store(to + i * stride, nibble(words >> (4 * i)) * scale + base);
}

/* Of written keys; no power of two, for the cache's sake. */
INLINE int64_t key_stride(int64_t dim) { return dim + 16; }

INLINE int64_t written_floats(const Attention *a) {
    return a->keys.weight ? BLOCK * key_stride(a->head_dim) : 0;
}

/* K of a unit where V is alone, made of `tile` if it is one, to rows `to`; NULL if K is held. */
static const float *write_keys(const Attention *a, const Unit *u, const Tile *tile, int64_t head,
                               float *to) {
    const Keys *keys = &a->keys;
    const Span *span = u->span;
    int64_t dim = a->head_dim, stride = key_stride(dim);
    if (span->tiles.start ? !span->tiles.k_is_v : span->k.start != NULL)
        return NULL;
    for (int t = 0; t < u->tokens; t += span->tiles.start ? 8 : 1)
        for (int64_t c = 0; c < dim; c += LANES) {
            float *k = to + t * stride + c;
            vf weight = load(keys->weight + c);
            if (span->tiles.start)
                write_values(tile, dim, t, c, weight, k, stride);
            else
                store(k, weight * load_row(span->v.format, row_at(&span->v, head, u->first + t), c));
        }
    const float *start = keys->starts + (u->position + BLOCK - 1) / BLOCK * 2 * keys->pairs;
    for (int t = 0; t < u->tokens; t++) {
        const float *place = keys->places + t * 2 * keys->pairs;
        int64_t i = 0;
        for (; i + LANES <= keys->pairs; i += LANES)
            turn_pairs(keys, start + i, place + i, to + t * stride + i, LANES);
        if (i < keys->pairs)
            turn_pairs(keys, start + i, place + i, to + t * stride + i, (int)(keys->pairs - i));
    }
    return to;
}

/* Less than every score that counts, and finite, so that differences are numbers. */
static const float NOTHING_YET = -1e30f;

/* Few query tokens: one pass over the keys, shared out over threads by KV head and by part of the
 * sequence. Four rows at a time share each code that is unpacked. */

enum {
    ROWS = 4,
    TILES_AHEAD = 2, /* that are fetched before their turn */
};

typedef struct {
    const Attention *attention;
    int64_t units, parts, length;
    float *partials; /* (n_kv_heads, parts, rows, head_dim + 2): sum of values, weight, maximum */
} StepJob;

/* What a thread holds of one row. */
typedef struct {
    float *q; /* (head_dim,), scaled */
    float *out; /* (head_dim,) */
    float *bases; /* (groups, LANES): sums over tokens of weight times V's base, lane by lane */
    float *weight; /* (LANES,): the sum of weights, lane by lane */
    float maximum;
    float *k_folded; /* (head_dim,): q times a tile's K scales */
    float scores[BLOCK];
} Row;

/* Asks for a unit's tile: memory takes longer to answer than a tile takes to compute with. */
INLINE void fetch_tile(const Attention *a, int64_t head, const Unit *u, int64_t ahead) {
    const Tiles *tiles = &u->span->tiles;
    if (!tiles->start || u->first / BLOCK + ahead >= u->span->tokens / BLOCK)
        return;
    const uint32_t *words = tile_words(tiles, head, u->first / BLOCK + ahead, a->head_dim);
    for (int64_t i = 0; i < tile_size(tiles->bits, tiles->k_is_v, a->head_dim); i += 16)
        __builtin_prefetch(words + i, 0, 2);
}

INLINE void scores_of_tile(int n, Row *rows, const Tile *tile, int64_t dim) {
    vf constant[ROWS];
    for (int r = 0; r < n; r++)
        constant[r] = (vf){0};
    for (int64_t c = 0; c < dim; c += LANES) {
        vf scale = load_half(tile->scales + c), base = base_of(tile, scale, load_half(tile->mids + c));
        for (int r = 0; r < n; r++) {
            vf q = load(rows[r].q + c);
            store(rows[r].k_folded + c, q * scale);
            constant[r] += q * base;
        }
    }
    const float *folded[ROWS];
    for (int r = 0; r < n; r++) {
        constant[r] = splat(sum_lanes(constant[r]));
        folded[r] = rows[r].k_folded;
    }
    for (int t = 0; t < BLOCK; t += 2 * LANES) {
        vf sums[ROWS][2];
        for (int r = 0; r < n; r++)
            sums[r][0] = sums[r][1] = constant[r];
        for (int64_t w = 0; w < dim / 8; w++) {
            vu codes0 = load_words(tile->k + w * BLOCK + t);
            vu codes1 = load_words(tile->k + w * BLOCK + t + LANES);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                vf code0 = nibble(codes0 >> (4 * j)), code1 = nibble(codes1 >> (4 * j));
#pragma GCC unroll 4
                for (int r = 0; r < n; r++) {
                    vf q = splat(folded[r][8 * w + j]);
                    sums[r][0] += q * code0;
                    sums[r][1] += q * code1;
                }
            }
        }
        for (int r = 0; r < n; r++) {
            store(rows[r].scores + t, sums[r][0]);
            store(rows[r].scores + t + LANES, sums[r][1]);
        }
    }
}

/* Adds LANES channels, and the next, of a tile's codes, by `weights` of n rows' tokens. */
INLINE void add_codes(int n, const float *const *weights, const Tile *tile, int64_t dim,
                      int64_t channel, vf sums[][2]) {
    for (int t = 0; t < BLOCK; t += 8) {
        vu codes0 = load_words(tile->v + t / 8 * dim + channel);
        vu codes1 = load_words(tile->v + t / 8 * dim + channel + LANES);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            vf code0 = nibble(codes0 >> (4 * j)), code1 = nibble(codes1 >> (4 * j));
#pragma GCC unroll 4
            for (int r = 0; r < n; r++) {
                vf weight = splat(weights[r][t + j]);
                sums[r][0] += weight * code0;
                sums[r][1] += weight * code1;
            }
        }
    }
}

/* Where V is alone. */
INLINE void values_of_channels(int n, Row *rows, const Tile *tile, int64_t dim) {
    const float *weights[ROWS];
    vf totals[ROWS];
    for (int r = 0; r < n; r++) {
        vf total = {0};
        for (int t = 0; t < BLOCK; t += LANES)
            total += load(rows[r].scores + t);
        totals[r] = splat(sum_lanes(total));
        weights[r] = rows[r].scores;
    }
    for (int64_t c = 0; c < dim; c += 2 * LANES) {
        vf sums[ROWS][2];
        for (int r = 0; r < n; r++)
            sums[r][0] = sums[r][1] = (vf){0};
        add_codes(n, weights, tile, dim, c, sums);
        for (int i = 0; i < 2; i++) {
            int64_t channel = c + i * LANES;
            vf scale = load_half(tile->scales + channel);
            vf base = base_of(tile, scale, load_half(tile->mids + channel));
            for (int r = 0; r < n; r++) {
                float *out = rows[r].out + channel;
                store(out, load(out) + scale * sums[r][i] + base * totals[r]);
            }
        }
    }
}

INLINE void values_of_tile(int n, Row *rows, const Tile *tile, int64_t dim) {
    for (int64_t c = 0; c < dim; c += GROUP) {
        const uint16_t *parameters = tile->v_parameters + c / GROUP * 2 * BLOCK;
        float folded[ROWS][BLOCK];
        const float *weights[ROWS];
        for (int r = 0; r < n; r++) {
            float *bases = rows[r].bases + c / GROUP * LANES;
            weights[r] = folded[r];
            vf sum = load(bases);
            for (int t = 0; t < BLOCK; t += LANES) {
                vf weight = load(rows[r].scores + t), scale = load_half(parameters + t);
                store(folded[r] + t, weight * scale);
                sum += weight * base_of(tile, scale, load_half(parameters + BLOCK + t));
            }
            store(bases, sum);
        }
        for (int64_t channel = c; channel < c + GROUP; channel += 2 * LANES) {
            vf sums[ROWS][2];
            for (int r = 0; r < n; r++) {
                sums[r][0] = load(rows[r].out + channel);
                sums[r][1] = load(rows[r].out + channel + LANES);
            }
            add_codes(n, weights, tile, dim, channel, sums);
            for (int r = 0; r < n; r++) {
                store(rows[r].out + channel, sums[r][0]);
                store(rows[r].out + channel + LANES, sums[r][1]);
            }
        }
    }
}

INLINE void scores_of_rows(int n, Format format, Row *rows, const char *k, int64_t stride,
                           int tokens, int64_t dim) {
    for (int t = 0; t < tokens; t += LANES) {
        vf sums[ROWS][LANES];
        for (int i = 0; i < LANES; i++) {
            const char *key = k + (t + i < tokens ? t + i : tokens - 1) * stride;
            vf token_sums[ROWS];
            for (int r = 0; r < n; r++)
                token_sums[r] = (vf){0};
            for (int64_t c = 0; c < dim; c += LANES) {
                vf x = load_row(format, key, c);
#pragma GCC unroll 4
                for (int r = 0; r < n; r++)
                    token_sums[r] += x * load(rows[r].q + c);
            }
            for (int r = 0; r < n; r++)
                sums[r][i] = token_sums[r];
        }
        for (int r = 0; r < n; r++)
            store(rows[r].scores + t, sum_rows(sums[r]));
    }
}

INLINE void values_of_rows(int n, Format format, Row *rows, const char *v, int64_t stride,
                           int tokens, int64_t dim) {
    for (int64_t c = 0; c < dim; c += 2 * LANES) {
        vf sums[ROWS][2];
        for (int r = 0; r < n; r++) {
            sums[r][0] = load(rows[r].out + c);
            sums[r][1] = load(rows[r].out + c + LANES);
        }
        for (int t = 0; t < tokens; t++) {
            vf v0 = load_row(format, v + t * stride, c);
            vf v1 = load_row(format, v + t * stride, c + LANES);
#pragma GCC unroll 4
            for (int r = 0; r < n; r++) {
                vf weight = splat(rows[r].scores[t]);
                sums[r][0] += weight * v0;
                sums[r][1] += weight * v1;
            }
        }
        for (int r = 0; r < n; r++) {
            store(rows[r].out + c, sums[r][0]);
            store(rows[r].out + c + LANES, sums[r][1]);
        }
    }
}

INLINE void scale_row(float *x, int64_t n, float factor) {
    for (int64_t i = 0; i < n; i += LANES)
        store(x + i, load(x + i) * splat(factor));
}

/* Scores to weights; what was summed under a smaller maximum is scaled down. */
INLINE void softmax_step(const Attention *a, Row *row, int low, int high) {
    cap_scores(a, row->scores, BLOCK);
    if (low > 0 || high < BLOCK)
        mask_scores(row->scores, low, high);
    vf most = load(row->scores);
    for (int t = LANES; t < BLOCK; t += LANES)
        most = max_of(most, load(row->scores + t));
    float maximum = max_lane(most);
    if (maximum > row->maximum) {
        float factor = expf(row->maximum - maximum);
        row->maximum = maximum;
        scale_row(row->out, a->head_dim, factor);
        scale_row(row->bases, a->head_dim / GROUP * LANES, factor);
        scale_row(row->weight, LANES, factor);
    }
    vf weight = load(row->weight);
    for (int t = 0; t < BLOCK; t += LANES) {
        vf p = exp_of(load(row->scores + t) - splat(row->maximum));
        store(row->scores + t, p);
        weight += p;
    }
    store(row->weight, weight);
}

/* tile: the unit's, if it is one; keys: its K, if that is written out. */
INLINE void step_rows(int n, const StepJob *job, const Unit *u, const Tile *tile, const float *keys,
                      int64_t head, Row *rows, int64_t first_row) {
    const Attention *a = job->attention;
    const Span *span = u->span;
    int low[ROWS], high[ROWS], any = 0;
    for (int r = 0; r < n; r++) {
        int64_t token = (first_row + r) % a->tokens;
        any |= visible(a, u, job->length - a->tokens + token, low + r, high + r);
    }
    if (!any)
        return;
    if (keys)
        scores_of_rows(n, F32, rows, (const char *)keys, 4 * key_stride(a->head_dim), u->tokens,
                       a->head_dim);
    else if (span->tiles.start)
        scores_of_tile(n, rows, tile, a->head_dim);
    else
        scores_of_rows(n, span->k.format, rows, row_at(&span->k, head, u->first),
                       span->k.token_stride, u->tokens, a->head_dim);
    for (int r = 0; r < n; r++)
        softmax_step(a, rows + r, low[r], high[r]);
    if (span->tiles.k_is_v)
        values_of_channels(n, rows, tile, a->head_dim);
    else if (span->tiles.start)
        values_of_tile(n, rows, tile, a->head_dim);
    else
        values_of_rows(n, span->v.format, rows, row_at(&span->v, head, u->first),
                       span->v.token_stride, u->tokens, a->head_dim);
}

static int64_t row_floats(int64_t dim) { return 3 * dim + dim / GROUP * LANES + LANES; }

static void step_piece(const void *of, int piece, int thread) {
    const StepJob *job = of;
    const Attention *a = job->attention;
    int64_t dim = a->head_dim, head = piece / job->parts, part = piece % job->parts;
    int64_t heads = a->n_heads / a->n_kv_heads, n_rows = heads * a->tokens;
    int64_t start = job->units * part / job->parts, end = job->units * (part + 1) / job->parts;
    for (int64_t i = start; i < end && i < start + TILES_AHEAD; i++) {
        Unit u = unit_at(a, i);
        fetch_tile(a, head, &u, 0);
    }
    Room room;
    Row *rows = pool_scratch(thread);
    float *written = (float *)(rows + n_rows), *memory = written + written_floats(a);
    memset(memory, 0, 4 * (size_t)(n_rows * row_floats(dim)));
    for (int64_t r = 0; r < n_rows; r++) {
        Row *row = rows + r;
        const float *q = a->q + (head * heads + r / a->tokens) * a->head_stride +
                         r % a->tokens * a->token_stride;
        row->q = memory;
        row->out = row->q + dim;
        row->k_folded = row->out + dim;
        row->bases = row->k_folded + dim;
        row->weight = row->bases + dim / GROUP * LANES;
        row->maximum = NOTHING_YET;
        memory += row_floats(dim);
        for (int64_t c = 0; c < dim; c += LANES)
            store(row->q + c, load(q + c) * splat(a->scale));
    }
    for (int64_t i = start; i < end; i++) {
        Unit u = unit_at(a, i);
        Tile tile = {0};
        if (u.span->tiles.start) {
            fetch_tile(a, head, &u, TILES_AHEAD);
            tile = tile_at(&u.span->tiles, head, u.first / BLOCK, dim, room);
        }
        const float *keys = write_keys(a, &u, &tile, head, written);
        for (int64_t r = 0; r < n_rows; r += ROWS) {
            switch (at_most(n_rows - r, ROWS)) {
            case 1: step_rows(1, job, &u, &tile, keys, head, rows + r, r); break;
            case 2: step_rows(2, job, &u, &tile, keys, head, rows + r, r); break;
            case 3: step_rows(3, job, &u, &tile, keys, head, rows + r, r); break;
            case 4: step_rows(4, job, &u, &tile, keys, head, rows + r, r); break;
            }
        }
    }
    float *partial = job->partials + piece * n_rows * (dim + 2);
    for (int64_t r = 0; r < n_rows; r++, partial += dim + 2) {
        for (int64_t c = 0; c < dim; c += GROUP) {
            vf base = splat(sum_lanes(load(rows[r].bases + c / GROUP * LANES)));
            for (int i = 0; i < GROUP; i += LANES)
                store(partial + c + i, load(rows[r].out + c + i) + base);
        }
        partial[dim] = sum_lanes(load(rows[r].weight));
        partial[dim + 1] = rows[r].maximum;
    }
}

/* The parts of one query head put together. */
static void merge_piece(const void *of, int query_head, int thread) {
    const StepJob *job = of;
    const Attention *a = job->attention;
    int64_t dim = a->head_dim, heads = a->n_heads / a->n_kv_heads, n_rows = heads * a->tokens;
    (void)thread;
    for (int64_t token = 0; token < a->tokens; token++) {
        int64_t row = query_head % heads * a->tokens + token;
        const float *partial =
            job->partials + (query_head / heads * job->parts * n_rows + row) * (dim + 2);
        int64_t stride = n_rows * (dim + 2);
        float maximum = a->sinks ? a->sinks[query_head] : NOTHING_YET;
        for (int64_t i = 0; i < job->parts; i++)
            maximum = fmaxf(maximum, partial[i * stride + dim + 1]);
        float *out = a->out + (token * a->n_heads + query_head) * dim;
        float weight = a->sinks ? expf(a->sinks[query_head] - maximum) : 0;
        for (int64_t c = 0; c < dim; c++)
            out[c] = 0;
        for (int64_t i = 0; i < job->parts; i++, partial += stride) {
            float factor = expf(partial[dim + 1] - maximum);
            weight += factor * partial[dim];
            for (int64_t c = 0; c < dim; c += LANES)
                store(out + c, load(out + c) + splat(factor) * load(partial + c));
        }
        scale_row(out, dim, 1.0f / weight);
    }
}

static int attend_step(const Attention *a) {
    enum { UNITS_AT_LEAST = 4, PIECES_PER_THREAD = 4 };
    int64_t units = count_units(a), n_rows = a->n_heads / a->n_kv_heads * a->tokens;
    int64_t parts = (PIECES_PER_THREAD * pool_size() + a->n_kv_heads - 1) / a->n_kv_heads;
    if (parts > units / UNITS_AT_LEAST)
        parts = units / UNITS_AT_LEAST;
    parts = parts ? parts : 1;
    size_t per_thread = (size_t)n_rows * (sizeof(Row) + 4 * (size_t)row_floats(a->head_dim)) +
                        4 * (size_t)written_floats(a);
    size_t partials = 4 * (size_t)(a->n_kv_heads * parts * n_rows * (a->head_dim + 2));
    if (!pool_reserve(per_thread, partials))
        return 0;
    StepJob job = {a, units, parts, count_tokens(a), pool_shared()};
    pool_run((int)(a->n_kv_heads * parts), step_piece, &job);
    for_tokens(a->n_heads, a->tokens * parts * a->head_dim, merge_piece, &job);
    return 1;
}

/* Many query tokens: rows against blocks of keys, both products with the register blocks of
 * linear.h on panels that are dequantised for one block of keys at a time. */

enum {
    CHUNK_ROWS = 144, /* about; of one piece */
    CHUNK_UNITS = 8, /* of one block of keys */
    CHUNK_KEYS = CHUNK_UNITS * BLOCK, /* at most DEPTH: weights are blocks of linear.h's x */
};

typedef struct {
    const Attention *attention;
    int64_t units, length, tokens_per_piece, pieces_per_head;
} ChunkJob;

/* K of a unit, transposed, as BLOCK / NR panels (head_dim, NR). `written`: room for K's rows. */
static void fill_keys(const Attention *a, const Unit *u, int64_t head, float *written,
                      float *panels) {
    const Span *span = u->span;
    int64_t dim = a->head_dim;
    Rows k = span->k;
    int64_t first = u->first;
    Room room;
    Tile tile = {0};
    if (span->tiles.start)
        tile = tile_at(&span->tiles, head, u->first / BLOCK, dim, room);
    if (write_keys(a, u, &tile, head, written)) {
        k = (Rows){(const char *)written, 0, 4 * key_stride(dim), F32};
        first = 0;
    }
    for (int t = 0; t < BLOCK; t += LANES) {
        float *panel = panels + t / NR * dim * NR + t % NR;
        if (!k.start) {
            for (int64_t c = 0; c < dim; c += LANES) {
                float scales[LANES], bases[LANES];
                vf scale = load_half(tile.scales + c);
                store(scales, scale);
                store(bases, base_of(&tile, scale, load_half(tile.mids + c)));
                for (int i = 0; i < LANES; i++) {
                    vu codes = load_words(tile.k + (c + i) / 8 * BLOCK + t);
                    vf code = nibble(codes >> (int)((c + i) % 8 * 4));
                    store(panel + (c + i) * NR, code * splat(scales[i]) + splat(bases[i]));
                }
            }
            continue;
        }
        for (int64_t c = 0; c < dim; c += LANES) {
            vf square[LANES];
            for (int i = 0; i < LANES; i++)
                square[i] = t + i < u->tokens
                                ? load_row(k.format, row_at(&k, head, first + t + i), c)
                                : (vf){0};
            transpose(square);
            for (int i = 0; i < LANES; i++)
                store(panel + (c + i) * NR, square[i]);
        }
    }
}

/* V of a unit, as BLOCK rows of head_dim / NR panels (keys, NR); `panels` is at its first row. */
static void fill_values(const Unit *u, int64_t head, int64_t dim, int64_t keys, float *panels) {
    const Span *span = u->span;
    Room room;
    Tile tile = {0};
    if (span->tiles.start)
        tile = tile_at(&span->tiles, head, u->first / BLOCK, dim, room);
    for (int64_t c = 0; c < dim; c += LANES) {
        float *panel = panels + c / NR * keys * NR + c % NR;
        if (span->tiles.k_is_v) {
            for (int t = 0; t < BLOCK; t += 8)
                write_values(&tile, dim, t, c, splat(1), panel + t * NR, NR);
            continue;
        }
        if (span->tiles.start) {
            const uint16_t *parameters = tile.v_parameters + c / GROUP * 2 * BLOCK;
            float scales[BLOCK], bases[BLOCK];
            for (int t = 0; t < BLOCK; t += LANES) {
                vf scale = load_half(parameters + t);
                store(scales + t, scale);
                store(bases + t, base_of(&tile, scale, load_half(parameters + BLOCK + t)));
            }
            for (int t = 0; t < BLOCK; t++) {
                vu codes = load_words(tile.v + t / 8 * dim + c);
                vf code = nibble(codes >> (t % 8 * 4));
                store(panel + t * NR, code * splat(scales[t]) + splat(bases[t]));
            }
            continue;
        }
        for (int t = 0; t < BLOCK; t++)
            store(panel + t * NR,
                  t < u->tokens ? load_row(span->v.format, row_at(&span->v, head, u->first + t), c)
                                : (vf){0});
    }
}

/* As softmax_step, for a row of the scores of `n` units. */
INLINE void softmax_chunk(const Attention *a, const Unit *units, int n, int64_t position,
                          float *scores, float *maximum, float *weight, float *out) {
    cap_scores(a, scores, n * BLOCK);
    vf most = splat(NOTHING_YET);
    for (int i = 0; i < n; i++) {
        int low, high;
        visible(a, units + i, position, &low, &high);
        if (low > 0 || high < BLOCK)
            mask_scores(scores + i * BLOCK, low, high);
        for (int t = i * BLOCK; t < (i + 1) * BLOCK; t += LANES)
            most = max_of(most, load(scores + t));
    }
    float new_maximum = max_lane(most);
    if (new_maximum > *maximum) {
        float factor = expf(*maximum - new_maximum);
        *maximum = new_maximum;
        *weight *= factor;
        scale_row(out, a->head_dim, factor);
    }
    vf sum = {0};
    for (int t = 0; t < n * BLOCK; t += LANES) {
        vf p = exp_of(load(scores + t) - splat(*maximum));
        store(scores + t, p);
        sum += p;
    }
    *weight += sum_lanes(sum);
}

static void chunk_piece(const void *of, int piece, int thread) {
    const ChunkJob *job = of;
    const Attention *a = job->attention;
    int64_t dim = a->head_dim, heads = a->n_heads / a->n_kv_heads;
    int64_t head = piece / job->pieces_per_head;
    int64_t first = piece % job->pieces_per_head * job->tokens_per_piece;
    int64_t tokens = at_most(a->tokens - first, (int)job->tokens_per_piece);
    int64_t n_rows = heads * tokens, slab = n_rows * STRIDE;
    float *q = pool_scratch(thread); /* (dim / DEPTH, rows, STRIDE): channels by DEPTH */
    float *scores = q + (dim + DEPTH - 1) / DEPTH * slab;
    float *panels = scores + slab, *out = panels + CHUNK_KEYS * dim;
    float *maxima = out + n_rows * dim, *weights = maxima + n_rows, *written = weights + n_rows;
    int64_t position = job->length - a->tokens + first;

    for (int64_t r = 0; r < n_rows; r++) {
        const float *from = a->q + (head * heads + r / tokens) * a->head_stride +
                            (first + r % tokens) * a->token_stride;
        for (int64_t c = 0; c < dim; c += LANES)
            store(q + c / DEPTH * slab + r * STRIDE + c % DEPTH, load(from + c) * splat(a->scale));
        maxima[r] = NOTHING_YET;
        weights[r] = 0;
    }
    memset(out, 0, 4 * (size_t)(n_rows * dim));

    for (int64_t next = 0; next < job->units;) {
        Unit units[CHUNK_UNITS];
        int n = 0;
        for (; next < job->units && n < CHUNK_UNITS; next++) {
            Unit u = unit_at(a, next);
            int seen_by_last = u.position < position + tokens;
            int seen_by_first = !a->window || u.position + u.tokens > position + 1 - a->window;
            if (seen_by_first && seen_by_last)
                units[n++] = u;
        }
        int64_t keys = n * BLOCK;
        for (int i = 0; i < n; i++)
            fill_keys(a, units + i, head, written, panels + i * BLOCK * dim);
        for (int64_t r = 0; r < n_rows; r += MR)
            for (int64_t key = 0; key < keys; key += NR)
                for (int64_t c = 0; c < dim; c += DEPTH)
                    multiply(at_most(n_rows - r, MR), q + c / DEPTH * slab + r * STRIDE,
                             panels + key * dim + c * NR, at_most(dim - c, DEPTH),
                             scores + r * STRIDE + key, STRIDE, NR, NULL, c > 0);
        for (int64_t r = 0; r < n_rows; r++)
            softmax_chunk(a, units, n, position + r % tokens, scores + r * STRIDE, maxima + r,
                          weights + r, out + r * dim);
        for (int i = 0; i < n; i++)
            fill_values(units + i, head, dim, keys, panels + i * BLOCK * NR);
        for (int64_t r = 0; r < n_rows; r += MR)
            for (int64_t c = 0; c < dim; c += NR)
                multiply(at_most(n_rows - r, MR), scores + r * STRIDE, panels + c * keys, keys,
                         out + r * dim + c, dim, NR, NULL, 1);
    }

    for (int64_t r = 0; r < n_rows; r++) {
        int64_t query_head = head * heads + r / tokens, token = first + r % tokens;
        float factor = 1.0f / weights[r];
        if (a->sinks) {
            float maximum = fmaxf(maxima[r], a->sinks[query_head]);
            float scale = expf(maxima[r] - maximum);
            factor = scale / (weights[r] * scale + expf(a->sinks[query_head] - maximum));
        }
        float *to = a->out + (token * a->n_heads + query_head) * dim;
        for (int64_t c = 0; c < dim; c += LANES)
            store(to + c, load(out + r * dim + c) * splat(factor));
    }
}

static int attend_chunk(const Attention *a) {
    int64_t dim = a->head_dim, heads = a->n_heads / a->n_kv_heads;
    int64_t tokens = CHUNK_ROWS / heads ? CHUNK_ROWS / heads : 1;
    int64_t slabs = (dim + DEPTH - 1) / DEPTH + 1, n_rows = heads * tokens;
    int64_t floats = n_rows * (slabs * STRIDE + dim + 2) + CHUNK_KEYS * dim + written_floats(a);
    if (!pool_reserve(4 * (size_t)floats, 0))
        return 0;
    int64_t pieces = (a->tokens + tokens - 1) / tokens;
    ChunkJob job = {a, count_units(a), count_tokens(a), tokens, pieces};
    pool_run((int)(a->n_kv_heads * pieces), chunk_piece, &job);
    return 1;
}
