//! Runs candle's quantized models for `measure.py`: `candle-peer MODEL.gguf TG TEST...`, tests as `pp128`, `tg0`, `tg512`,
//! `ttft32`. Prints a JSON line a test. Threads by RAYON_NUM_THREADS.

use candle_core::quantized::gguf_file::Content;
use candle_core::{Device, Result, Tensor};
use candle_transformers::models::{quantized_llama, quantized_qwen2};
use std::time::Instant;

enum Model {
    Llama(quantized_llama::ModelWeights),
    Qwen2(quantized_qwen2::ModelWeights),
}

impl Model {
    fn load(path: &str) -> Result<(Self, usize)> {
        let mut file = std::fs::File::open(path)?;
        let content = Content::read(&mut file)?;
        let architecture = content.metadata["general.architecture"].to_string()?.clone();
        let vocab_size = content.metadata["tokenizer.ggml.tokens"].to_vec()?.len();
        let model = match architecture.as_str() {
            "llama" => Self::Llama(quantized_llama::ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?),
            "qwen2" => Self::Qwen2(quantized_qwen2::ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?),
            other => return Err(candle_core::Error::Msg(format!("no model for architecture {other}"))),
        };
        Ok((model, vocab_size))
    }

    /// One forward from position `at` (0 starts a new cache), and the argmax of its last row.
    fn run(&mut self, ids: &[u32], at: usize) -> Result<u32> {
        let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        let logits = match self {
            Self::Llama(model) => model.forward(&input, at)?,
            Self::Qwen2(model) => model.forward(&input, at)?,
        };
        logits.flatten_all()?.argmax(0)?.to_scalar()
    }
}

/// The ids of `npuhal bench`.
fn ids(count: usize, vocab_size: usize) -> Vec<u32> {
    let mut state = 42u64;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % vocab_size as u64) as u32
    };
    (0..count).map(next).collect()
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let (path, tg, tests) = (&args[1], args[2].parse::<usize>().expect("tokens to decode"), &args[3..]);
    let started = Instant::now();
    let (mut model, vocab_size) = Model::load(path)?;
    if !tests.iter().any(|test| test.starts_with("ttft")) {
        model.run(&ids(8, vocab_size), 0)?;
    }
    let mut cached = (0, 0);
    for test in tests {
        let number = test.trim_start_matches(char::is_alphabetic).parse::<usize>().expect("a number in a test's name");
        if test.starts_with("ttft") {
            model.run(&ids(number, vocab_size), 0)?;
            println!("{{\"test\":\"{test}\",\"ms\":{:.2}}}", started.elapsed().as_secs_f64() * 1e3);
        } else if test.starts_with("pp") {
            let start = Instant::now();
            cached = (number, model.run(&ids(number, vocab_size), 0)?);
            println!("{{\"test\":\"{test}\",\"tps\":{:.2}}}", number as f64 / start.elapsed().as_secs_f64());
        } else {
            let mut token = ids(1, vocab_size)[0];
            if number > 0 {
                if cached.0 != number {
                    cached = (number, model.run(&ids(number, vocab_size), 0)?);
                }
                token = cached.1;
            }
            let start = Instant::now();
            for step in 0..tg {
                token = model.run(&[token], number + step)?;
            }
            println!("{{\"test\":\"{test}\",\"tps\":{:.2}}}", tg as f64 / start.elapsed().as_secs_f64());
            cached = (0, 0);
        }
    }
    Ok(())
}
