//! Streams, headers and chunk weights by the published layouts.
#![allow(unreachable_pub, reason = "a module of one test file")]

use super::model::{Family, Layer, Matrix, Model, bf16, value};

fn push(bytes: &mut Vec<u8>, elements: &[u16]) {
    bytes.extend(elements.iter().flat_map(|element| element.to_le_bytes()));
}

/// Fills up to a multiple of `block` elements.
fn pad(bytes: &mut Vec<u8>, block: usize) {
    bytes.resize(bytes.len().next_multiple_of(2 * block), 0);
}

fn push_rows(bytes: &mut Vec<u8>, matrix: &Matrix, first: usize, count: usize) {
    push(bytes, &matrix.bits[first * matrix.columns..(first + count) * matrix.columns]);
}

/// Six tile streams of a SmolLM engine.
pub fn smollm_stream(model: &Model) -> Vec<u8> {
    let mut bytes = Vec::new();
    for tile in 0..6 {
        for layer in &model.layers {
            push(&mut bytes, &layer.input_norm);
            push(&mut bytes, &layer.post_norm);
            pad(&mut bytes, 4608);
            push_rows(&mut bytes, &layer.qkv, 160 * tile, 160);
            push_rows(&mut bytes, &layer.o, 96 * tile, 96);
            for group in 0..16 {
                push_rows(&mut bytes, &layer.gate_up, 256 * tile + 16 * group, 16);
                push_rows(&mut bytes, &layer.gate_up, 1536 + 256 * tile + 16 * group, 16);
            }
            push_rows(&mut bytes, &layer.down, 96 * tile, 96);
        }
        push(&mut bytes, &model.final_norm);
        pad(&mut bytes, 4608);
    }
    bytes
}

const OUT_START: [usize; 7] = [0, 152, 304, 452, 600, 748, 896];
const MLP_START: [usize; 7] = [0, 816, 1632, 2448, 3264, 4064, 4864];
const HEAD_START: [usize; 7] = [0, 25_344, 50_688, 76_032, 101_376, 126_656, 151_936];

/// Offset of a tile's stream, bytes of its layers, bytes of all.
pub fn qwen_tile(layers: usize, tile: usize) -> (usize, usize, usize) {
    let of = |tile: usize| {
        let layers = layers * [723, 723, 716, 716, 708, 708][tile] * 7168;
        (layers, layers + [6337, 6337, 6337, 6337, 6321, 6321][tile] * 7168)
    };
    let (own, all) = of(tile);
    ((0..tile).map(|tile| of(tile).1).sum(), own, all)
}

pub fn qwen_stream_bytes(layers: usize) -> usize {
    let (at, _, all) = qwen_tile(layers, 5);
    at + all
}

/// Six tile streams of a Qwen engine, with the head.
pub fn qwen_stream(model: &Model, out: &mut [u8]) {
    for tile in 0..6 {
        let (at, layers, all) = qwen_tile(model.layers.len(), tile);
        let mut bytes = Vec::new();
        for layer in &model.layers {
            push_qwen_layer(&mut bytes, layer, tile);
        }
        assert_eq!(bytes.len(), layers);
        out[at..at + layers].copy_from_slice(&bytes);
        let head = &mut out[at + layers..at + all];
        head[..7168].fill(0);
        for (column, gamma) in model.final_norm.iter().enumerate() {
            head[2 * column..2 * column + 2].copy_from_slice(&gamma.to_le_bytes());
        }
        for (row, bytes) in (HEAD_START[tile]..HEAD_START[tile + 1]).zip(head[7168..].chunks_exact_mut(2 * 896)) {
            for (column, bytes) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *bytes = (model.head)(row, column).to_le_bytes();
            }
        }
    }
}

fn push_qwen_layer(bytes: &mut Vec<u8>, layer: &Layer, tile: usize) {
    let (out, mlp) = (OUT_START[tile]..OUT_START[tile + 1], MLP_START[tile]..MLP_START[tile + 1]);
    push(bytes, &layer.input_norm);
    push(bytes, &layer.post_norm);
    bytes.extend(layer.bias[192 * tile..192 * (tile + 1)].iter().flat_map(|bias| bias.to_le_bytes()));
    pad(bytes, 3584);
    push_rows(bytes, &layer.qkv, 192 * tile, 192);
    push_rows(bytes, &layer.o, out.start, out.len());
    for group in mlp.step_by(16) {
        push_rows(bytes, &layer.gate_up, group, 16);
        push_rows(bytes, &layer.gate_up, 4864 + group, 16);
    }
    for rows in out.step_by(4) {
        for chunk in 0..6 {
            let columns = MLP_START[chunk]..MLP_START[chunk + 1];
            for row in rows..rows + 4 {
                push(bytes, &layer.down.row(row)[columns.clone()]);
                pad(bytes, 896);
            }
        }
    }
}

/// Object 0 of the cache buffer.
pub fn header(model: &Model, token: usize, position: usize) -> Vec<u16> {
    let mut header = vec![0; 8192];
    for pair in 0..32 {
        let (cosine, sine) = model.angle(pair, position);
        match model.family {
            Family::SmolLm => {
                header[pair] = bf16(cosine.into());
                header[32 + pair] = bf16(sine.into());
            }
            Family::Qwen => {
                for (at, whole) in [(0, cosine), (96, sine)] {
                    let high = bf16(whole.into());
                    let middle = bf16(f64::from(whole - value(high)));
                    let low = bf16(f64::from(whole - value(high) - value(middle)));
                    for (part, bits) in [high, middle, low].into_iter().enumerate() {
                        header[at + 32 * part + pair] = bits;
                    }
                }
            }
        }
    }
    let (position_at, embedding_at) = if model.family == Family::SmolLm { (64, 128) } else { (192, 256) };
    header[position_at] = bf16(position as f64);
    header[embedding_at..embedding_at + model.hidden].copy_from_slice(&model.embedding(token));
    header
}

/// The RoPE argument of a chunked graph.
pub fn rope_row(model: &Model, position: usize) -> Vec<u16> {
    let mut row = vec![0; 66];
    for pair in 0..32 {
        let (cosine, sine) = model.angle(pair, position);
        (row[pair], row[32 + pair]) = (bf16(cosine.into()), bf16(sine.into()));
    }
    row[64] = bf16(position as f64);
    row
}

/// Norms, and biases in two parts.
pub fn chunk_parameters(model: &Model, layer: &Layer) -> Vec<u8> {
    let mut bytes = Vec::new();
    push(&mut bytes, &layer.input_norm);
    push(&mut bytes, &layer.post_norm);
    if model.family == Family::Qwen {
        let high: Vec<u16> = layer.bias.iter().map(|bias| bf16((*bias).into())).collect();
        let low: Vec<u16> =
            layer.bias.iter().zip(&high).map(|(bias, high)| bf16(f64::from(bias - value(*high)))).collect();
        push(&mut bytes, &high);
        push(&mut bytes, &low);
    }
    bytes
}

/// A scale that is a power of two and keeps every weight within eight bits.
pub fn power_scale(matrix: &Matrix) -> f64 {
    let largest = matrix.bits.iter().map(|bits| f64::from(value(*bits)).abs()).fold(0.0, f64::max);
    (largest / 127.0).log2().ceil().exp2()
}

/// Blocks of `rows` rows in eight bits, each followed by its scales.
fn push_w8(bytes: &mut Vec<u8>, matrix: &Matrix, rows: usize) {
    let scale = power_scale(matrix);
    for first in (0..matrix.rows()).step_by(rows) {
        for row in first..first + rows {
            bytes.extend(matrix.row(row).iter().map(|bits| (f64::from(value(*bits)) / scale) as i8 as u8));
        }
        (0..rows).for_each(|_| bytes.extend((scale as f32).to_le_bytes()));
    }
}

/// The buffer of weights of a chunked graph.
pub fn chunk_weights(model: &Model, layers: &[Layer], is_w8: bool) -> Vec<u8> {
    let parts: [fn(&Layer) -> &Matrix; 4] =
        [|layer| &layer.qkv, |layer| &layer.o, |layer| &layer.gate_up, |layer| &layer.down];
    let mut bytes = Vec::new();
    for (part, matrix) in parts.into_iter().enumerate() {
        if model.family == Family::Qwen {
            let rows = if part == 3 { 1 } else { 16 };
            for block in 0..matrix(&layers[0]).rows() / rows {
                layers.iter().for_each(|layer| push_rows(&mut bytes, matrix(layer), block * rows, rows));
            }
            continue;
        }
        for layer in layers {
            let matrix = matrix(layer);
            match (is_w8, part) {
                (true, _) => push_w8(&mut bytes, matrix, if part == 3 { 32 } else { 64 }),
                (false, 2) => {
                    for six in (0..96).step_by(6) {
                        [0, 2, 4, 1, 3, 5].iter().for_each(|i| push_rows(&mut bytes, matrix, 32 * (six + i), 32));
                    }
                }
                _ => push(&mut bytes, &matrix.bits),
            }
        }
    }
    bytes
}

/// The buffer of weights of the projection, and what its rows are worth.
pub fn projection_weights(matrix: &Matrix) -> (Vec<u8>, Vec<Vec<f64>>) {
    let mut bytes = Vec::new();
    let mut rows = Vec::new();
    for block in matrix.bits.chunks(32 * matrix.columns) {
        let mut scales = Vec::new();
        for row in block.chunks_exact(matrix.columns) {
            let largest = row.iter().map(|bits| value(*bits).abs()).fold(0.0, f32::max);
            let scale = largest / 127.0;
            let codes: Vec<i8> = row.iter().map(|bits| (value(*bits) / scale).round_ties_even() as i8).collect();
            bytes.extend(codes.iter().map(|code| *code as u8));
            rows.push(codes.iter().map(|code| f64::from(*code) * f64::from(scale)).collect());
            scales.extend(scale.to_le_bytes());
        }
        bytes.extend(scales);
    }
    (bytes, rows)
}
