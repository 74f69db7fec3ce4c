/* The int4 codec of kernels/codec.py, bit for bit, on tiles in this backend's own order:
 *
 *     words                    what
 *     0        .. 4 head_dim   K codes: token t, channels 8 w to 8 w + 7 in word w * BLOCK + t
 *     4        .. 5 head_dim   K scale of each channel, then K mid of each, fp16
 *     5        .. 9 head_dim   V codes: channel c, tokens 8 o to 8 o + 7 in word o * head_dim + c
 *     9        .. 10 head_dim  per group of channels: V scale of each token, then V mid, fp16
 *
 * So neighbouring words are what attention computes side by side: tokens for K, channels for V. */

typedef struct {
    const uint32_t *k, *v; /* codes */
    const uint16_t *k_scales, *k_mids; /* (head_dim,) */
    const uint16_t *v_parameters; /* (head_dim / GROUP, 2, BLOCK) */
} Tile;

INLINE Tile tile_at(const uint32_t *words, int64_t head_dim) {
    const uint16_t *k_parameters = (const uint16_t *)(words + 4 * head_dim);
    return (Tile){words, words + 5 * head_dim, k_parameters, k_parameters + head_dim,
                  (const uint16_t *)(words + 9 * head_dim)};
}

INLINE const uint32_t *tile_words(const Tiles *tiles, int64_t head, int64_t block,
                                  int64_t head_dim) {
    return tiles->start + head * tiles->head_stride + block * 10 * head_dim;
}

/* A stored code is code + 8, so x = (mid - 8 scale) + scale * stored. */
INLINE vf base_of(vf scale, vf mid) { return mid - splat(8.0f) * scale; }

INLINE const char *row_at(const Rows *rows, int64_t head, int64_t token) {
    return rows->start + head * rows->head_stride + token * rows->token_stride;
}

INLINE vf load_row(Format format, const char *row, int64_t channel) {
    if (format == F32)
        return load((const float *)row + channel);
    return load_half((const uint16_t *)row + channel);
}

/* Sealing */

INLINE vf saturated(vf x) {
    vi number = x == x;
    return min_of(max_of((vf)((vi)x & number), splat(-65504.0f)), splat(65504.0f));
}

INLINE vu code_of(vf x, vf mid, vf divisor) {
    const vf magic = splat(0x1.8p23f); /* adding it rounds to an integer, ties to even */
    vf code = (x - mid) / divisor;
    code = min_of(max_of(code, splat(-8.0f)), splat(7.0f));
    code = (code + magic) - magic;
    return (vu)__builtin_convertvector(code + splat(8.0f), vi);
}

INLINE float divisor_of(uint16_t scale) {
    float divisor = half_to_float(scale);
    return divisor == 0 ? INFINITY : divisor;
}

/* K of one block: LANES channels at a time, side by side in the lanes. */
static void seal_k(const Seal *s, int64_t head, int64_t block, uint32_t *tile) {
    int64_t dim = s->head_dim;
    uint16_t *scales = (uint16_t *)(tile + 4 * dim), *mids = scales + dim;
    for (int64_t c = 0; c < dim; c += LANES) {
        vf x[BLOCK], low = {0}, high = {0};
        for (int t = 0; t < BLOCK; t++) {
            x[t] = saturated(load_row(s->k.format, row_at(&s->k, head, block * BLOCK + t), c));
            low = t ? min_of(low, x[t]) : x[t];
            high = t ? max_of(high, x[t]) : x[t];
        }
        vf step = (high - low) / splat(15.0f), mid = low + splat(8.0f) * step, divisor = {0};
        for (int i = 0; i < LANES; i++) {
            scales[c + i] = float_to_half(step[i]);
            mids[c + i] = float_to_half(mid[i]);
            divisor[i] = divisor_of(scales[c + i]);
            mid[i] = half_to_float(mids[c + i]);
        }
        for (int t = 0; t < BLOCK; t += LANES) {
            vf codes[LANES];
            for (int i = 0; i < LANES; i++)
                codes[i] = (vf)code_of(x[t + i], mid, divisor);
            transpose(codes);
            for (int i = 0; i < LANES; i++) {
                int64_t channel = c + i;
                uint32_t *words = tile + channel / 8 * BLOCK + t;
                vu others = channel % 8 ? load_words(words) : (vu){0};
                store_words(words, others | (vu)codes[i] << (4 * (channel % 8)));
            }
        }
    }
}

/* V of one block, one group of channels at a time. */
static void seal_v(const Seal *s, int64_t head, int64_t block, uint32_t *tile) {
    int64_t dim = s->head_dim;
    uint16_t *parameters = (uint16_t *)(tile + 9 * dim);
    memset(tile + 5 * dim, 0, 16 * (size_t)dim);
    for (int64_t group = 0; group < dim; group += GROUP, parameters += 2 * BLOCK) {
        for (int t = 0; t < BLOCK; t++) {
            const char *row = row_at(&s->v, head, block * BLOCK + t);
            vf x[GROUP / LANES], low = {0}, high = {0};
            for (int i = 0; i < GROUP / LANES; i++) {
                x[i] = saturated(load_row(s->v.format, row, group + i * LANES));
                low = i ? min_of(low, x[i]) : x[i];
                high = i ? max_of(high, x[i]) : x[i];
            }
            float smallest = -max_lane(-low), step = (max_lane(high) - smallest) / 15.0f;
            uint16_t scale = float_to_half(step), mid = float_to_half(smallest + 8.0f * step);
            parameters[t] = scale;
            parameters[BLOCK + t] = mid;
            for (int i = 0; i < GROUP / LANES; i++) {
                uint32_t *words = tile + 5 * dim + t / 8 * dim + group + i * LANES;
                vu code = code_of(x[i], splat(half_to_float(mid)), splat(divisor_of(scale)));
                store_words(words, load_words(words) | code << (4 * (t % 8)));
            }
        }
    }
}

static void seal_piece(const void *of, int piece, int thread) {
    const Seal *s = of;
    int64_t head = piece / s->blocks, block = piece % s->blocks;
    uint32_t *tile = s->tiles + piece * 10 * s->head_dim;
    (void)thread;
    seal_k(s, head, block, tile);
    seal_v(s, head, block, tile);
}

static int seal(const Seal *s) {
    pool_run((int)(s->heads * s->blocks), seal_piece, s);
    return 1;
}

/* Finite in fp16: at the end of its range, rounded parameters may lead past it. */
INLINE float decoded(uint16_t scale, uint16_t mid, int code) {
    float x = half_to_float(mid) + half_to_float(scale) * (float)code;
    return fminf(fmaxf(x, -65504.0f), 65504.0f);
}

static void unseal_piece(const void *of, int piece, int thread) {
    const Unseal *u = of;
    int64_t dim = u->head_dim, head = piece / u->blocks, block = piece % u->blocks;
    Tile tile = tile_at(tile_words(&u->tiles, head, block, dim), dim);
    float *k = u->k + piece * BLOCK * dim, *v = u->v + piece * BLOCK * dim;
    (void)thread;
    for (int64_t t = 0; t < BLOCK; t++)
        for (int64_t c = 0; c < dim; c++) {
            int k_code = (int)(tile.k[c / 8 * BLOCK + t] >> (4 * (c % 8)) & 15) - 8;
            int v_code = (int)(tile.v[t / 8 * dim + c] >> (4 * (t % 8)) & 15) - 8;
            const uint16_t *of_v = tile.v_parameters + c / GROUP * 2 * BLOCK + t;
            k[t * dim + c] = decoded(tile.k_scales[c], tile.k_mids[c], k_code);
            v[t * dim + c] = decoded(of_v[0], of_v[BLOCK], v_code);
        }
}

static int unseal(const Unseal *u) {
    pool_run((int)(u->heads * u->blocks), unseal_piece, u);
    return 1;
}
