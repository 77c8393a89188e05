//! A decoder layer for one token.

use super::attention::Attention;
use super::groups::{GROUP_ROWS, Groups};
use super::math::{narrow, rms_norm, rotate, rounded, silu, widen};
use super::{CHUNK_FEATURES, Dimensions, HEAD_DIM, ports};
use crate::array::program::{Step, StreamKey, Streams};

const GROUPS_OF_CHUNK: usize = CHUNK_FEATURES / GROUP_ROWS;
/// Cosines and sines, norms of query and key heads.
const ROTATION_ELEMENTS: usize = 3 * HEAD_DIM;

/// The layer's state between two steps.
#[derive(Debug)]
pub(super) struct Layer {
    dimensions: Dimensions,
    phase: Phase,
    act: Option<Vec<f32>>,
    norms: Option<Vec<f32>>,
    rotation: Option<Vec<f32>>,
    /// Results of the matrix in progress.
    results: Vec<f32>,
}

#[derive(Debug)]
enum Phase {
    /// The small inputs are taken as they come.
    Inputs,
    /// Query, key and value.
    Projections(Groups),
    /// Rows that go to the cache; the next is the first.
    NewRows {
        query: Vec<f32>,
        rows: Vec<(StreamKey, Vec<u8>)>,
    },
    Attention(Attention),
    Output(Groups),
    UpGate(Groups),
    Down(Groups),
    Result(Vec<u8>),
    /// What control code has written is impossible; nothing goes on.
    Stuck(String),
}

impl Layer {
    pub(super) fn new(dimensions: Dimensions) -> Self {
        Self { dimensions, phase: Phase::Inputs, act: None, norms: None, rotation: None, results: Vec::new() }
    }

    pub(super) fn unfinished(&self) -> Option<String> {
        let doing = match &self.phase {
            Phase::Inputs if self.act.is_none() && self.norms.is_none() && self.rotation.is_none() => return None,
            Phase::Inputs => "waits for residual stream, norms and rotation".to_owned(),
            Phase::Projections(groups) => format!("query, key and value: {}", groups.progress()),
            Phase::NewRows { rows, .. } => format!("{} rows of the cache to write", rows.len()),
            Phase::Attention(attention) => format!("attention: {}", attention.progress()),
            Phase::Output(groups) => format!("output projection: {}", groups.progress()),
            Phase::UpGate(groups) => format!("up and gate projection: {}", groups.progress()),
            Phase::Down(groups) => format!("down projection: {}", groups.progress()),
            Phase::Result(_) => "the residual stream is not written".to_owned(),
            Phase::Stuck(reason) => reason.clone(),
        };
        Some(format!("layer: {doing}"))
    }

    pub(super) fn step(&mut self, streams: &mut Streams<'_>) -> Step {
        let moved = match &mut self.phase {
            Phase::Inputs => self.take_input(streams),
            Phase::Projections(groups) | Phase::Output(groups) | Phase::Down(groups) => {
                groups.step(streams, |group| group * GROUP_ROWS, &mut self.results)
            }
            Phase::UpGate(groups) => {
                let width = self.dimensions.intermediate;
                groups.step(streams, |group| up_gate_row(group, width), &mut self.results)
            }
            Phase::NewRows { rows, .. } => match rows.first() {
                Some((output, row)) if streams.write(*output, row) => {
                    rows.remove(0);
                    true
                }
                _ => false,
            },
            Phase::Attention(attention) => attention.step(streams),
            Phase::Result(bytes) => {
                streams.write(ports::RESULT, bytes) && {
                    bytes.clear();
                    true
                }
            }
            Phase::Stuck(_) => false,
        };
        if !moved {
            return Step::Waiting;
        }
        self.advance(streams);
        Step::Progress
    }

    fn take_input(&mut self, streams: &mut Streams<'_>) -> bool {
        let hidden = self.dimensions.hidden;
        let inputs = [
            (ports::ACTIVATIONS, hidden, &mut self.act),
            (ports::NORMS, 2 * hidden, &mut self.norms),
            (ports::ROTATION, ROTATION_ELEMENTS, &mut self.rotation),
        ];
        for (input, elements, values) in inputs {
            let mut bytes = vec![0; 2 * elements];
            if values.is_none() && streams.read(input, &mut bytes) {
                *values = Some(widen(&bytes));
                return true;
            }
        }
        false
    }

    /// Goes on to the next phase where the present one is done.
    fn advance(&mut self, streams: &Streams<'_>) {
        let next = match &mut self.phase {
            Phase::Inputs => self.start(),
            Phase::Projections(groups) if groups.is_done() => Some(self.new_rows()),
            Phase::NewRows { query, rows } if rows.is_empty() => {
                let query = std::mem::take(query);
                Some(match context_len(streams) {
                    Ok(context) => Phase::Attention(Attention::new(&self.dimensions, context, query)),
                    Err(reason) => Phase::Stuck(reason),
                })
            }
            Phase::Attention(attention) if attention.is_done() => {
                let output = attention.output();
                Some(Phase::Output(self.matrix(self.dimensions.hidden, output)))
            }
            Phase::Output(groups) if groups.is_done() => {
                self.add_to_residual();
                let operand = self.normed(1);
                Some(Phase::UpGate(self.matrix(2 * self.dimensions.intermediate, operand)))
            }
            Phase::UpGate(groups) if groups.is_done() => {
                let (up, gate) = self.results.split_at(self.dimensions.intermediate);
                let operand = up.iter().zip(gate).map(|(up, gate)| rounded(silu(*gate) * up)).collect();
                Some(Phase::Down(self.matrix(self.dimensions.hidden, operand)))
            }
            Phase::Down(groups) if groups.is_done() => {
                self.add_to_residual();
                Some(Phase::Result(narrow(self.act.as_deref().unwrap_or_default())))
            }
            Phase::Result(bytes) if bytes.is_empty() => {
                (self.act, self.norms, self.rotation) = (None, None, None);
                Some(Phase::Inputs)
            }
            _ => None,
        };
        if let Some(next) = next {
            self.phase = next;
        }
    }

    /// The first matrix, when all inputs are there.
    fn start(&mut self) -> Option<Phase> {
        if self.act.is_none() || self.norms.is_none() || self.rotation.is_none() {
            return None;
        }
        let operand = self.normed(0);
        let rows = self.dimensions.query_width() + 2 * self.dimensions.kv_width();
        Some(Phase::Projections(self.matrix(rows, operand)))
    }

    /// A matrix with `rows` output features; results start at zero.
    fn matrix(&mut self, rows: usize, operand: Vec<f32>) -> Groups {
        self.results.clear();
        self.results.resize(rows, 0.0);
        Groups::new(rows, operand)
    }

    /// The residual stream under the input norm (0) or the post-attention norm (1), rounded to bf16.
    fn normed(&self, which: usize) -> Vec<f32> {
        let (Some(act), Some(norms)) = (&self.act, &self.norms) else { return Vec::new() };
        let weights = &norms[which * act.len()..];
        rms_norm(act, weights, self.dimensions.norm_epsilon).into_iter().map(rounded).collect()
    }

    fn add_to_residual(&mut self) {
        let act = self.act.iter_mut().flatten();
        act.zip(&self.results).for_each(|(act, result)| *act += result);
    }

    /// Norms and rotates query and key; keys, then values, go to the cache.
    fn new_rows(&mut self) -> Phase {
        let (query_width, kv_width) = (self.dimensions.query_width(), self.dimensions.kv_width());
        let epsilon = self.dimensions.norm_epsilon;
        let rotation = self.rotation.as_deref().unwrap_or_default();
        let (angles, head_norms) = rotation.split_at(HEAD_DIM);
        let (cosines, sines) = angles.split_at(HEAD_DIM / 2);
        let (query_norm, key_norm) = head_norms.split_at(HEAD_DIM);
        let turn = |heads: &mut [f32], norm: &[f32]| {
            for head in heads.chunks_exact_mut(HEAD_DIM) {
                head.copy_from_slice(&rms_norm(head, norm, epsilon));
                rotate(head, cosines, sines);
            }
        };
        let (query, rest) = self.results.split_at_mut(query_width);
        let (key, value) = rest.split_at_mut(kv_width);
        turn(query, query_norm);
        turn(key, key_norm);
        let row = |of: &[f32], half: usize| narrow(&of[half * kv_width / 2..(half + 1) * kv_width / 2]);
        let rows = [&*key, &*value].into_iter().flat_map(|of| [0, 1].map(|half| (ports::new_row(half), row(of, half))));
        Phase::NewRows { query: query.iter().map(|element| rounded(*element)).collect(), rows: rows.collect() }
    }
}

/// Row of the first feature of a group of the up and gate projection: up's rows are first, then gate's.
fn up_gate_row(group: usize, width: usize) -> usize {
    let (chunk, within) = (group / (2 * GROUPS_OF_CHUNK), group % (2 * GROUPS_OF_CHUNK));
    let gate = if within < GROUPS_OF_CHUNK { 0 } else { width };
    gate + chunk * CHUNK_FEATURES + within % GROUPS_OF_CHUNK * GROUP_ROWS
}

/// The context length that all attention cores hold.
fn context_len(streams: &Streams<'_>) -> Result<u32, String> {
    let words = ports::CONTEXT_WORDS.map(|(column, row, offset)| streams.data_word(column, row, offset));
    match words[0] {
        0 => Err("no context length was written".to_owned()),
        context if words == [context; ports::CONTEXT_WORDS.len()] => Ok(context),
        _ => Err(format!("the attention cores hold different context lengths: {words:?}")),
    }
}
