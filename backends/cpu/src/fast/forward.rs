//! The passes of a fast segment.

use super::{FastSegment, Plan};
use crate::activations::{Activations, Forms, Precision};
use crate::attention::{Attention, RowPages};
use crate::elementwise::add;
use crate::gemm::{self, Panels};
use crate::gemv;
use crate::kv;
use crate::memory::{Scratch, Shared};
use crate::packed::PackedMatrix;
use crate::pool::{JobPanicked, Pool};
use crate::table::KernelTable;
use npuhal_core::error::RunError;
use npuhal_core::stage::{HiddenRows, Row, Tap, Yields};
use npuhal_models::ModelConfig;
use npuhal_models::config::Activation;

/// Scratch of a forward pass; keeps its memory from call to call.
#[derive(Debug, Default)]
pub(super) struct Work {
    /// Residual stream: rows × hidden size.
    x: Scratch,
    /// Normed rows, and what projections back to the hidden size give.
    normed: Scratch,
    q: Scratch,
    k: Scratch,
    v: Scratch,
    attended: Scratch,
    gate: Scratch,
    up: Scratch,
    /// Cosines and sines of each row's position, for one rotation after the other.
    angles: Scratch,
    /// What a block gives, normed: rows × hidden size, where the model norms it.
    output: Scratch,
    inputs: Activations,
    panels: Panels,
    attention: Attention,
}

impl Work {
    /// Makes room for `rows`; returns the residual stream to fill.
    pub(super) fn begin(&mut self, config: &ModelConfig, rows: &[Row], plan: &Plan) -> &mut [f32] {
        let count = rows.len();
        let (table_len, angles_len) = (plan.table_len(), plan.rotations.len() * plan.table_len());
        for (scratch, width) in [
            (&mut self.x, config.hidden_size),
            (&mut self.normed, config.hidden_size),
            (&mut self.q, config.q_width()),
            (&mut self.k, config.kv_width()),
            (&mut self.v, config.kv_width()),
            (&mut self.attended, config.q_width()),
            (&mut self.gate, config.intermediate_size),
            (&mut self.up, config.intermediate_size),
            (&mut self.angles, angles_len),
            (&mut self.output, if config.features.output_norms { config.hidden_size } else { 0 }),
        ] {
            scratch.reserve::<f32>(count * width);
        }
        let angles = self.angles.get_mut::<f32>(count * angles_len);
        for (row, angles) in rows.iter().zip(angles.chunks_exact_mut(angles_len.max(1))) {
            for (rotation, angles) in plan.rotations.iter().zip(angles.chunks_exact_mut(table_len.max(1))) {
                rotation.angles(row.position, angles);
            }
        }
        self.x.get_mut(count * config.hidden_size)
    }

    /// Keeps only the rows `wanted` (ascending) of `count` in the residual stream.
    pub(super) fn keep(&mut self, width: usize, count: usize, wanted: &[usize]) {
        keep_rows(self.x.get_mut(count * width), width, wanted);
    }
}

/// Moves the rows `wanted` (ascending) to the front.
fn keep_rows(rows: &mut [f32], width: usize, wanted: &[usize]) {
    for (to, &from) in wanted.iter().enumerate() {
        if to != from {
            rows.copy_within(from * width..(from + 1) * width, to * width);
        }
    }
}

impl FastSegment {
    /// One layer over the residual stream. With `wanted`, all rows write keys and values, but only the wanted rows are
    /// computed further and remain.
    #[allow(unsafe_code, reason = "threads write disjoint rows")]
    pub(super) fn layer(&mut self, index: usize, rows: &[Row], wanted: Option<&[usize]>) -> Result<(), RunError> {
        let (table, precision) = (self.options.features.table(), self.options.precision);
        let (config, pool, weights, work) = (&self.config, &*self.pool, &self.weights.layers[index], &mut self.work);
        let (width, q_width, kv_width) = (config.hidden_size, config.q_width(), config.kv_width());
        let count = rows.len();

        let x = work.x.get_mut::<f32>(count * width);
        let projections = [&weights.q, &weights.k, &weights.v];
        let normed = work.normed.get_mut::<f32>(count * width);
        work.inputs.reset(count, width, precision, forms_of(count, precision, projections));
        norm_rows(pool, table, x, &weights.input_norm, config.rms_norm_eps, normed, &mut work.inputs)?;
        let outs = [
            work.q.get_mut::<f32>(count * q_width),
            work.k.get_mut::<f32>(count * kv_width),
            work.v.get_mut::<f32>(count * kv_width),
        ];
        product(pool, table, projections, &work.inputs, outs, &mut work.panels)?;
        self.write_keys(index, rows)?;

        let (config, pool, weights, work) = (&self.config, &*self.pool, &self.weights.layers[index], &mut self.work);
        let x = work.x.get_mut::<f32>(count * width);
        let q = work.q.get_mut::<f32>(count * q_width);
        let mut views: Vec<RowPages<'_>> = Vec::with_capacity(count);
        let window = self.plan.layers[index].window;
        let view = |row: &Row| {
            let position = row.position as usize;
            let first = (position + 1).saturating_sub(window);
            RowPages { pages: self.cache.pages(index, row.sequence), position, first }
        };
        if let Some(wanted) = wanted {
            keep_rows(x, width, wanted);
            keep_rows(q, q_width, wanted);
            views.extend(wanted.iter().map(|&index| view(&rows[index])));
        } else {
            views.extend(rows.iter().map(view));
        }
        let count = views.len();
        if count == 0 {
            return Ok(());
        }
        let x = &mut x[..count * width];
        let attended = work.attended.get_mut::<f32>(count * q_width);
        work.attention.run(pool, table, self.cache.shape(), &views, &q[..count * q_width], attended)?;

        work.inputs.reset(count, q_width, precision, forms_of(count, precision, [&weights.o]));
        let writer = work.inputs.writer();
        for_rows(pool, count, &|row| {
            // SAFETY: each row is filled once.
            unsafe { writer.row(table, row, &attended[row * q_width..(row + 1) * q_width]) };
        })?;
        let normed = work.normed.get_mut::<f32>(count * width);
        product(pool, table, [&weights.o], &work.inputs, [&mut *normed], &mut work.panels)?;
        match &weights.attention_output_norm {
            Some(norm) => add_normed(pool, table, config, norm, x, normed, &mut work.output)?,
            None => add_rows(pool, width, config.features.residual_scale, x, normed)?,
        }

        work.inputs.reset(count, width, precision, forms_of(count, precision, [&weights.gate, &weights.up]));
        norm_rows(pool, table, x, &weights.post_attention_norm, config.rms_norm_eps, normed, &mut work.inputs)?;
        let inner = config.intermediate_size;
        let gate = work.gate.get_mut::<f32>(count * inner);
        let up = work.up.get_mut::<f32>(count * inner);
        let outs = [&mut *gate, &mut *up];
        product(pool, table, [&weights.gate, &weights.up], &work.inputs, outs, &mut work.panels)?;

        work.inputs.reset(count, inner, precision, forms_of(count, precision, [&weights.down]));
        let writer = work.inputs.writer();
        let gate = Shared::new(gate);
        for_rows(pool, count, &|row| {
            // SAFETY: each row is changed and filled once.
            unsafe {
                let gate = gate.slice(row * inner, inner);
                let up = &up[row * inner..(row + 1) * inner];
                match config.features.activation {
                    Activation::GeluTanh => table.geglu(gate, up),
                    _ => table.swiglu(gate, up),
                }
                writer.row(table, row, gate);
            }
        })?;
        product(pool, table, [&weights.down], &work.inputs, [&mut *normed], &mut work.panels)?;
        match &weights.feed_forward_output_norm {
            Some(norm) => add_normed(pool, table, config, norm, x, normed, &mut work.output)?,
            None => add_rows(pool, width, config.features.residual_scale, x, normed)?,
        }
        Ok(())
    }

    /// Biases, head norms, RoPE and query scale; then keys and values go to the cache.
    #[allow(unsafe_code, reason = "threads write disjoint rows")]
    fn write_keys(&mut self, index: usize, rows: &[Row]) -> Result<(), RunError> {
        let table = self.options.features.table();
        let (config, weights, work) = (&self.config, &self.weights.layers[index], &mut self.work);
        let (q_width, kv_width, dim) = (config.q_width(), config.kv_width(), config.head_dim);
        let count = rows.len();
        let shape = self.cache.shape();
        let pages: Vec<Shared<u16>> = rows.iter().map(|&row| self.cache.page_mut(index, row)).collect();
        let q = Shared::new(work.q.get_mut::<f32>(count * q_width));
        let k = Shared::new(work.k.get_mut::<f32>(count * kv_width));
        let v = Shared::new(work.v.get_mut::<f32>(count * kv_width));
        let (table_len, angles_len) = (self.plan.table_len(), self.plan.rotations.len() * self.plan.table_len());
        let angles = work.angles.get::<f32>(count * angles_len);
        let scale = self.plan.query_scale;
        let rotation = self.plan.layers[index].rotation.map(|which| (&self.plan.rotations[which], which * table_len));
        for_rows(&self.pool, count, &|row| {
            // SAFETY: row `row` of each, by one thread; rows are different positions of the cache.
            let (q, k, v) = unsafe {
                (q.slice(row * q_width, q_width), k.slice(row * kv_width, kv_width), v.slice(row * kv_width, kv_width))
            };
            if let Some(biases) = &weights.biases {
                add(q, &biases.q);
                add(k, &biases.k);
                add(v, &biases.v);
            }
            let norms = weights.head_norms.as_ref();
            let rotate = |head: &mut [f32]| {
                if let Some((rotation, at)) = rotation {
                    rotation.rotate(head, &angles[row * angles_len + at..][..table_len]);
                }
            };
            for head in q.chunks_exact_mut(dim) {
                if let Some(norms) = norms {
                    norm_in_place(table, head, &norms.q, config.rms_norm_eps);
                }
                rotate(head);
                head.iter_mut().for_each(|q| *q *= scale);
            }
            for head in k.chunks_exact_mut(dim) {
                if let Some(norms) = norms {
                    norm_in_place(table, head, &norms.k, config.rms_norm_eps);
                }
                rotate(head);
            }
            // SAFETY: `admit` has made the page that holds this row's position.
            unsafe { kv::write(pages[row], shape, rows[row].position as usize, k, v) };
        })?;
        Ok(())
    }

    /// Shows a layer's rows to the observer.
    pub(super) fn observe_layer(&mut self, index: usize, number: usize, rows: &[Row]) {
        let Some(sink) = &mut self.sink else { return };
        let (width, kv_width) = (self.config.hidden_size, self.config.kv_width());
        let number = number as u32;
        debug_assert!(index < self.weights.layers.len());
        let mut keys = Vec::new();
        for (at, &row) in rows.iter().enumerate() {
            keys.clear();
            keys.extend_from_slice(&self.work.k.get(rows.len() * kv_width)[at * kv_width..][..kv_width]);
            self.config.rope.unpair(&mut keys, self.config.head_dim);
            sink.observe(Tap::K(number), row, &keys);
            sink.observe(Tap::V(number), row, &self.work.v.get(rows.len() * kv_width)[at * kv_width..][..kv_width]);
            sink.observe(Tap::LayerOut(number), row, &self.work.x.get(rows.len() * width)[at * width..][..width]);
        }
    }

    /// Final norm and head over the wanted rows, which are all that the residual stream still holds.
    pub(super) fn finish(&mut self, rows: &[Row], wanted: &[usize], hidden: &mut HiddenRows) -> Result<(), RunError> {
        let table = self.options.features.table();
        let (config, pool, weights, work) = (&self.config, &*self.pool, &self.weights, &mut self.work);
        let (count, width) = (wanted.len(), config.hidden_size);
        let x = work.x.get_mut::<f32>(count * width);
        let normed = work.normed.get_mut::<f32>(count * width);
        let precision = self.options.precision;
        let forms = weights.head.as_ref().map_or(Forms::default(), |head| forms_of(count, precision, [head]));
        work.inputs.reset(count, width, precision, forms);
        match &weights.final_norm {
            Some(norm) => norm_rows(pool, table, x, norm, config.rms_norm_eps, normed, &mut work.inputs)?,
            None => {
                work.inputs.fill(table, x);
                normed.copy_from_slice(x);
            }
        }
        hidden.reset(count, self.span.width(config));
        match &weights.head {
            Some(head) if count > 0 => {
                product(pool, table, [head], &work.inputs, [hidden.as_mut_slice()], &mut work.panels)?;
            }
            Some(_) => {}
            None => hidden.as_mut_slice().copy_from_slice(normed),
        }
        if self.span.has_head() {
            finish_logits(config, hidden.as_mut_slice());
        }
        for (at, &index) in wanted.iter().enumerate() {
            if let Some(sink) = &mut self.sink {
                if self.span.has_final_norm() {
                    sink.observe(Tap::Normed, rows[index], &normed[at * width..(at + 1) * width]);
                }
                if self.span.yields == Yields::Logits {
                    sink.observe(Tap::Logits, rows[index], hidden.row(at));
                }
            }
            if self.span.yields == Yields::Logits && !hidden.row(at).iter().all(|logit| logit.is_finite()) {
                return Err(RunError::NotFinite { what: format!("logits at position {}", rows[index].position) });
            }
        }
        Ok(())
    }
}

/// Whether products of `rows` input rows with all of `matrices` go through GEMV: where most of the weights are faster so.
fn by_gemv<const N: usize>(rows: usize, matrices: [&PackedMatrix; N]) -> bool {
    let largest = matrices.iter().max_by_key(|matrix| matrix.bytes().len());
    largest.is_none_or(|matrix| rows <= gemv::few_rows(matrix.weight_type()))
}

/// The forms of an input of `rows` rows that the products with all of `matrices` read.
fn forms_of<const N: usize>(rows: usize, precision: Precision, matrices: [&PackedMatrix; N]) -> Forms {
    let forms = if by_gemv(rows, matrices) { gemv::forms } else { gemm::forms };
    matrices.iter().fold(Forms::default(), |all, matrix| all.or(forms(matrix.weight_type(), precision)))
}

fn product<const N: usize>(
    pool: &Pool,
    table: &KernelTable,
    matrices: [&PackedMatrix; N],
    input: &Activations,
    outs: [&mut [f32]; N],
    panels: &mut Panels,
) -> Result<(), JobPanicked> {
    if by_gemv(input.rows(), matrices) {
        gemv::run(pool, table, matrices, input, outs)
    } else {
        gemm::run(pool, table, matrices, input, outs, panels)
    }
}

/// Runs `work` for every row: one row on the calling thread, many on all threads.
fn for_rows(pool: &Pool, rows: usize, work: &(dyn Fn(usize) + Sync)) -> Result<(), JobPanicked> {
    if rows == 1 {
        work(0);
        return Ok(());
    }
    // Work for at least a microsecond or two.
    let block = rows.div_ceil(8 * pool.threads()).max(2);
    pool.run_items(rows.div_ceil(block), &|_, item| (item * block..rows.min((item + 1) * block)).for_each(work))
}

/// `normed = rms_norm(x)`, and its input forms.
#[allow(unsafe_code, reason = "threads write disjoint rows")]
fn norm_rows(
    pool: &Pool,
    table: &KernelTable,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    normed: &mut [f32],
    inputs: &mut Activations,
) -> Result<(), JobPanicked> {
    let width = weight.len();
    let normed = Shared::new(normed);
    let writer = inputs.writer();
    for_rows(pool, x.len() / width, &|row| {
        // SAFETY: each row is written once.
        unsafe {
            let normed = normed.slice(row * width, width);
            table.rms_norm(&x[row * width..(row + 1) * width], weight, eps, normed);
            writer.row(table, row, normed);
        }
    })
}

/// Division and soft-cap of the logits, where the model has them.
fn finish_logits(config: &ModelConfig, logits: &mut [f32]) {
    let divisor = config.features.logit_divisor;
    if divisor != 1.0 {
        logits.iter_mut().for_each(|logit| *logit /= divisor);
    }
    if let Some(cap) = config.features.logit_softcap {
        // In f64, whose tanh is that of the C library on every instruction set.
        let cap = f64::from(cap);
        logits.iter_mut().for_each(|logit| *logit = (cap * (f64::from(*logit) / cap).tanh()) as f32);
    }
}

/// `x += scale · rms_norm(y)`, row by row.
#[allow(unsafe_code, reason = "threads write disjoint rows")]
fn add_normed(
    pool: &Pool,
    table: &KernelTable,
    config: &ModelConfig,
    norm: &[f32],
    x: &mut [f32],
    y: &[f32],
    output: &mut Scratch,
) -> Result<(), JobPanicked> {
    let (width, eps) = (norm.len(), config.rms_norm_eps);
    let output = output.get_mut::<f32>(x.len());
    let normed = Shared::new(&mut *output);
    for_rows(pool, x.len() / width, &|row| {
        // SAFETY: each row is written once.
        let normed = unsafe { normed.slice(row * width, width) };
        table.rms_norm(&y[row * width..(row + 1) * width], norm, eps, normed);
    })?;
    add_rows(pool, width, config.features.residual_scale, x, output)
}

/// `x += scale · y`, row by row.
#[allow(unsafe_code, reason = "threads write disjoint rows")]
fn add_rows(pool: &Pool, width: usize, scale: f32, x: &mut [f32], y: &[f32]) -> Result<(), JobPanicked> {
    let rows = x.len() / width;
    let x = Shared::new(x);
    for_rows(pool, rows, &|row| {
        // SAFETY: each row is written once.
        let x = unsafe { x.slice(row * width, width) };
        let y = &y[row * width..(row + 1) * width];
        if scale == 1.0 {
            add(x, y);
        } else {
            x.iter_mut().zip(y).for_each(|(x, y)| *x += y * scale);
        }
    })
}

fn norm_in_place(table: &KernelTable, head: &mut [f32], weight: &[f32], eps: f32) {
    const PART: usize = 512;
    let mut copy = [0.0; PART];
    match copy.get_mut(..head.len()) {
        Some(copy) => {
            copy.copy_from_slice(head);
            table.rms_norm(copy, weight, eps, head);
        }
        None => {
            let copy = head.to_vec();
            table.rms_norm(&copy, weight, eps, head);
        }
    }
}
