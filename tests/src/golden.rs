//! Reference values of real models, and the rules by which a stepper is held against them.

use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Stepper, TokenId, Want};
use npuhal_models::ModelSource;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Reference values of one model; see `data/cpu/README.md`.
pub struct Golden {
    /// Catalogue name.
    pub model: String,
    /// Prompts in order.
    pub prompts: Vec<GoldenPrompt>,
}

/// Reference values of one prompt.
pub struct GoldenPrompt {
    /// The question, for messages.
    pub text: String,
    /// Ids of the rendered prompt.
    pub ids: Vec<TokenId>,
    /// The largest logits at the last prompt position.
    pub top: Vec<(usize, f64)>,
    /// l2 norm of that row.
    pub logits_l2: f64,
    /// Greedy continuation.
    pub greedy_ids: Vec<TokenId>,
    /// Logit of the first minus logit of the second, at each step.
    pub margins: Vec<f64>,
    /// After each layer at the last prompt position: l2 norm and first values of the residual stream.
    pub layers: Vec<(f64, Vec<f64>)>,
    /// llama.cpp's root-mean-square distance to the exact logits row.
    pub llama_cpp_rms: f64,
    /// The exact logits row, where stored.
    pub logits: Option<StoredRow>,
}

/// A stored logits row.
pub struct StoredRow {
    /// Every `stride`-th value.
    pub values: Vec<f32>,
    /// Distance of the stored values in the row.
    pub stride: usize,
}

impl Golden {
    /// Reads the values of the catalogue model `model`.
    ///
    /// # Panics
    /// When the files are missing or damaged.
    #[must_use]
    pub fn read(model: &str) -> Self {
        let path = data_dir().join(format!("{model}.json"));
        let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let root: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let prompts = array(&root["prompts"]).iter().enumerate();
        let prompts = prompts.map(|(index, prompt)| read_prompt(model, index, prompt)).collect();
        Self { model: model.to_owned(), prompts }
    }
}

/// What is demanded of a numerics.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    /// Largest distance of a stored top logit.
    pub top_logit: Option<f64>,
    /// Largest share of llama.cpp's distance to the exact row, as geometric mean over the prompts that have a row.
    pub share_of_llama_cpp: Option<f64>,
    /// The argmax must be equal at every teacher-forced step whose margin is above this.
    pub margin: f64,
}

impl Rules {
    /// The oracle.
    pub const EXACT: Self = Self { top_logit: Some(0.05), share_of_llama_cpp: None, margin: 0.1 };
    /// The default path.
    pub const FAST: Self = Self { top_logit: None, share_of_llama_cpp: Some(0.05), margin: 0.05 };
    /// Inputs of 8 bits, as llama.cpp's.
    pub const INT8: Self = Self { top_logit: None, share_of_llama_cpp: Some(1.0), margin: 1.5 };
}

/// What was found, for messages and reports.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    /// Largest distance of a stored top logit.
    pub top_logit: f64,
    /// Root-mean-square distance to the stored row and llama.cpp's, by prompt.
    pub rms: Vec<(f64, f64)>,
    /// Steps whose argmax was compared.
    pub steps: usize,
    /// What broke a rule.
    pub broken: Vec<String>,
}

/// Holds the stepper that `open` makes of the real model `model` against the reference values.
///
/// # Panics
/// When a rule is broken, or the model cannot be had (see [`crate::models::path`]).
pub fn check(model: &str, rules: Rules, open: impl FnOnce(&ModelSource) -> Box<dyn Stepper>) {
    let Some(path) = crate::models::path(model) else { return };
    let source = ModelSource::open(&path).unwrap_or_else(|error| panic!("{error}"));
    let golden = Golden::read(model);
    let findings = measure(&golden, rules, &mut *open(&source));
    report(model, &findings);
    assert!(findings.broken.is_empty(), "{model}: {}", findings.broken.join("\n"));
}

/// Runs all prompts teacher-forced, each in one call.
///
/// # Panics
/// When the stepper fails.
pub fn measure(golden: &Golden, rules: Rules, stepper: &mut dyn Stepper) -> Findings {
    let mut findings = Findings::default();
    stepper.begin().unwrap_or_else(|error| panic!("begin: {error}"));
    for prompt in &golden.prompts {
        let logits = teacher_forced(prompt, stepper);
        compare_first_row(prompt, rules, logits.row(0), &mut findings);
        compare_steps(prompt, rules, &logits, &mut findings);
    }
    stepper.end();
    if let Some(limit) = rules.share_of_llama_cpp {
        let shares = findings.rms.iter().map(|(ours, theirs)| (ours / theirs).ln());
        let share = (shares.sum::<f64>() / findings.rms.len() as f64).exp();
        if exceeds(share, limit) {
            findings.broken.push(format!("{share:.4} of llama.cpp's distance to the exact rows; allowed {limit}"));
        }
    }
    findings
}

/// Logits at the last prompt position and at every greedy id but the last.
fn teacher_forced(prompt: &GoldenPrompt, stepper: &mut dyn Stepper) -> HiddenRows {
    let sequence = SequenceId(0);
    assert_eq!(stepper.truncate(sequence, 0), 0, "an empty sequence");
    let forced = &prompt.greedy_ids[..prompt.greedy_ids.len() - 1];
    let ids = prompt.ids.iter().chain(forced);
    let rows: Vec<Row> =
        ids.enumerate().map(|(position, &token)| Row { sequence, token, position: position as u32 }).collect();
    let flags: Vec<bool> = (0..rows.len()).map(|index| index + 1 >= prompt.ids.len()).collect();
    let mut logits = HiddenRows::new();
    let result = stepper.step(&rows, Want::Each(&flags), &mut logits, &Control::new());
    result.unwrap_or_else(|error| panic!("{}: {error}", prompt.text));
    assert_eq!(logits.rows(), prompt.greedy_ids.len());
    logits
}

fn compare_first_row(prompt: &GoldenPrompt, rules: Rules, row: &[f32], findings: &mut Findings) {
    for &(id, wanted) in &prompt.top {
        let distance = (f64::from(row[id]) - wanted).abs();
        findings.top_logit = findings.top_logit.max(distance);
        if let Some(limit) = rules.top_logit
            && exceeds(distance, limit)
        {
            findings.broken.push(format!("{:?}: logit {id} is {}, wanted {wanted}", prompt.text, row[id]));
        }
    }
    if rules.top_logit.is_some() {
        let l2 = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        if exceeds((l2 / prompt.logits_l2 - 1.0).abs(), 1e-4) {
            findings.broken.push(format!("{:?}: l2 norm of the logits {l2}, wanted {}", prompt.text, prompt.logits_l2));
        }
    }
    if let Some(stored) = &prompt.logits {
        assert_eq!(stored.values.len(), row.len().div_ceil(stored.stride), "values of a stored row");
        let pairs = row.iter().step_by(stored.stride).zip(&stored.values);
        let squares = pairs.map(|(found, wanted)| (f64::from(*found) - f64::from(*wanted)).powi(2)).sum::<f64>();
        findings.rms.push(((squares / stored.values.len() as f64).sqrt(), prompt.llama_cpp_rms));
    }
}

/// A value that is no number exceeds every limit.
fn exceeds(value: f64, limit: f64) -> bool {
    value.is_nan() || value > limit
}

fn compare_steps(prompt: &GoldenPrompt, rules: Rules, logits: &HiddenRows, findings: &mut Findings) {
    for (step, (&wanted, &margin)) in prompt.greedy_ids.iter().zip(&prompt.margins).enumerate() {
        if margin <= rules.margin {
            continue;
        }
        findings.steps += 1;
        let found = argmax(logits.row(step));
        if found != wanted as usize {
            let text = &prompt.text;
            findings.broken.push(format!("{text:?}, step {step}: argmax {found}, wanted {wanted} (margin {margin})"));
        }
    }
}

/// Index of the first largest value.
#[must_use]
pub fn argmax(row: &[f32]) -> usize {
    row.iter().enumerate().fold(0, |best, (index, value)| if *value > row[best] { index } else { best })
}

#[allow(clippy::print_stderr, reason = "figures belong into the test's output")]
fn report(model: &str, findings: &Findings) {
    let rms: Vec<String> = findings.rms.iter().map(|(ours, theirs)| format!("{ours:.2e} ({theirs:.2e})")).collect();
    eprintln!(
        "{model}: largest top-20 distance {:.2e}; rms (llama.cpp's) {}; {} steps compared",
        findings.top_logit,
        rms.join(", "),
        findings.steps
    );
}

fn data_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("data/cpu")
}

fn read_prompt(model: &str, index: usize, prompt: &Value) -> GoldenPrompt {
    let exact = &prompt["exact"];
    let ids = |value: &Value| array(value).iter().map(|id| number(id) as TokenId).collect();
    GoldenPrompt {
        text: prompt["prompt"].as_str().unwrap_or_default().to_owned(),
        ids: ids(&prompt["ids"]),
        top: array(&exact["top20"]).iter().map(|pair| (number(&pair[0]) as usize, number(&pair[1]))).collect(),
        logits_l2: number(&exact["logits_l2"]),
        greedy_ids: ids(&exact["greedy_ids"]),
        margins: numbers(&exact["greedy_margin"]),
        layers: array(&exact["layer_out_last_pos"])
            .iter()
            .map(|layer| (number(&layer["l2"]), numbers(&layer["head4"])))
            .collect(),
        llama_cpp_rms: number(&prompt["llama_cpp"]["rms_logit_diff_to_exact"]),
        logits: read_stored_row(model, index),
    }
}

fn read_stored_row(model: &str, index: usize) -> Option<StoredRow> {
    let file = |suffix: String| data_dir().join(format!("{model}.p{index}.logits{suffix}.npy"));
    let whole = file(String::new());
    if whole.is_file() {
        return Some(StoredRow { values: read_npy(&whole), stride: 1 });
    }
    let strided = file(".stride4".to_owned());
    if strided.is_file() {
        return Some(StoredRow { values: read_npy(&strided), stride: 4 });
    }
    let parts: Vec<PathBuf> = (0..4).map(|part| file(format!(".part{part}of4"))).collect();
    let some = parts.iter().any(|part| part.is_file());
    some.then(|| StoredRow { values: parts.iter().flat_map(|part| read_npy(part)).collect(), stride: 1 })
}

/// A one-dimensional little-endian float32 array in NumPy's format, version 1.
fn read_npy(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(bytes.starts_with(b"\x93NUMPY\x01\x00"), "{}: no NumPy file of version 1", path.display());
    let header_len = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let header = String::from_utf8_lossy(&bytes[10..10 + header_len]);
    assert!(header.contains("'<f4'") && header.contains(",), "), "{}: header {header}", path.display());
    bytes[10 + header_len..].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

fn array(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_else(|| panic!("wanted an array, found {value}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("wanted a number, found {value}"))
}

fn numbers(value: &Value) -> Vec<f64> {
    array(value).iter().map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use npuhal_core::RunError;
    use npuhal_core::stage::{Placement, SegmentCapacity};

    const VOCAB: usize = 8;

    /// Answers each position with the same row: `peak` at one id, plus `noise` everywhere.
    struct Fixed {
        peak: usize,
        noise: f32,
    }

    impl Fixed {
        fn row(&self) -> [f32; VOCAB] {
            std::array::from_fn(|id| self.noise + if id == self.peak { 9.0 } else { id as f32 * 0.5 })
        }
    }

    impl Stepper for Fixed {
        fn vocab_size(&self) -> usize {
            VOCAB
        }
        fn capacity(&self) -> SegmentCapacity {
            SegmentCapacity { positions: 64, rows_per_call: 64, sequences: 1 }
        }
        fn placement(&self) -> Vec<Placement> {
            Vec::new()
        }
        fn begin(&mut self) -> Result<(), RunError> {
            Ok(())
        }
        fn end(&mut self) {}
        fn step(&mut self, rows: &[Row], want: Want<'_>, logits: &mut HiddenRows, _: &Control) -> Result<(), RunError> {
            logits.reset(want.count(rows.len()), VOCAB);
            (0..logits.rows()).for_each(|row| logits.row_mut(row).copy_from_slice(&self.row()));
            Ok(())
        }
        fn truncate(&mut self, _: SequenceId, len: usize) -> usize {
            len
        }
    }

    fn golden(margin: f64) -> Golden {
        let right = Fixed { peak: 3, noise: 0.0 }.row();
        let prompt = GoldenPrompt {
            text: "?".to_owned(),
            ids: vec![1, 2],
            top: vec![(3, 9.0), (7, 3.5)],
            logits_l2: right.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt(),
            greedy_ids: vec![3; 4],
            margins: vec![5.5, margin, 5.5, 5.5],
            layers: Vec::new(),
            llama_cpp_rms: 1.0,
            logits: Some(StoredRow { values: right.iter().step_by(4).copied().collect(), stride: 4 }),
        };
        Golden { model: "fixed".to_owned(), prompts: vec![prompt] }
    }

    fn broken(rules: Rules, margin: f64, peak: usize, noise: f32) -> usize {
        measure(&golden(margin), rules, &mut Fixed { peak, noise }).broken.len()
    }

    #[test]
    fn the_rules_tell_right_from_wrong() {
        assert_eq!(broken(Rules::EXACT, 5.5, 3, 0.0), 0);
        assert_eq!(broken(Rules::FAST, 5.5, 3, 0.0), 0);
        assert_eq!(broken(Rules::EXACT, 5.5, 3, 0.06), 3, "both top logits and the norm");
        assert_eq!(broken(Rules::FAST, 5.5, 3, 0.04), 0, "within a twentieth of llama.cpp's distance");
        assert_eq!(broken(Rules::FAST, 5.5, 3, 0.06), 1, "beyond it");
        assert_eq!(broken(Rules::FAST, 5.5, 3, f32::NAN), 5, "numbers that are none break the share and every step");
        assert_eq!(broken(Rules::FAST, 0.01, 7, 0.0), 3, "a step of small margin is not compared");
        assert_eq!(broken(Rules::FAST, 5.5, 7, 0.0), 4);
    }

    #[test]
    fn the_stored_values_are_whole() {
        for (model, vocab, rows, layers) in [("smollm2-135m", 49152, 3, 30), ("qwen2.5-coder-0.5b", 151_936, 2, 24)] {
            let golden = Golden::read(model);
            assert_eq!(golden.prompts.len(), 5);
            let stored: Vec<_> = golden.prompts.iter().filter_map(|prompt| prompt.logits.as_ref()).collect();
            assert_eq!(stored.len(), rows);
            assert!(stored.iter().all(|row| row.values.len() * row.stride == vocab));
            for prompt in &golden.prompts {
                assert_eq!((prompt.greedy_ids.len(), prompt.margins.len(), prompt.top.len()), (64, 64, 20));
                assert_eq!(prompt.layers.len(), layers);
                assert_eq!(prompt.greedy_ids[0] as usize, prompt.top[0].0);
            }
        }
    }
}
