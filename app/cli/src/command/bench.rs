//! `npuhal bench`: prefill and decode speed of the whole engine, on ids that need no tokenizer.

use crate::Host;
use crate::args::BenchArgs;
use crate::command::bench_http;
use crate::command::calibrate::calibrate;
use crate::command::parallel::parallel;
use crate::command::run::peak_memory_bytes;
use crate::error::CliError;
use crate::session::{Plan, message_ids, plan};
use crate::terminal::say;
use npuhal_core::error::RunError;
use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Session, Stepper, TokenId, Want};
use npuhal_cpu::limits::ReadLoop;
use npuhal_models::TensorRole;
use npuhal_models::sampling::greedy;
use npuhal_registry::RouteError;
use serde_json::json;
use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

/// Ids of the warm-up: enough to touch every weight and to wake the threads.
pub(super) const WARM_UP_TOKENS: u32 = 8;
/// Shortest time for which the read loop of a round runs.
const READ_TIME: Duration = Duration::from_millis(100);

pub(crate) fn bench(host: &Host, args: &BenchArgs) -> Result<(), CliError> {
    let started = Instant::now();
    if let Some(url) = &args.http.url {
        if !args.model.session.is_unset() || args.model.verify {
            let message = "--url: the model runs on the server; how and where is said there, not here";
            return Err(CliError::Usage(message.to_owned()));
        }
        return bench_http::bench(host, &args.http, url, args.model.model.as_deref());
    }
    if args.calibrate {
        return calibrate(host, args);
    }
    if args.ttft.is_some() || args.ttft_text.is_some() {
        return first_token(host, args, started);
    }
    if !args.parallel.is_empty() {
        return parallel(host, args);
    }
    let mut args = args.clone();
    let needed = needed_positions(&args)?;
    let context = &mut args.model.session.context;
    *context = Some(context.unwrap_or(0).max(needed));
    let plan = plan(host, &args.model)?;
    let mut stepper = stepper(&plan)?;
    let mut bed = Bed::new(stepper.as_mut(), &host.control);
    bed.prefill(WARM_UP_TOKENS)?;
    // The loop's own memory is not the model's: the peak is read before there is one.
    let mut memory = None;
    let mut limit: Option<Limit> = None;
    let mut table = vec![("TEST".to_owned(), "TOK/S".to_owned(), String::new())];
    for test in tests(&args) {
        let decodes = matches!(test, Test::Decode { .. });
        if decodes && memory.is_none() {
            memory = peak_memory_bytes();
            limit = Limit::of(&plan)?;
        }
        let (mut rates, mut reads) = (Vec::new(), Vec::new());
        for _ in 0..args.rounds {
            let elapsed = match test {
                Test::Prefill { tokens } => bed.prefill(tokens)?,
                Test::Decode { depth, tokens } => bed.decode(depth, tokens)?,
            };
            rates.push(f64::from(test.tokens()) / elapsed.as_secs_f64().max(f64::MIN_POSITIVE));
            if let (true, Some(limit)) = (decodes, &limit) {
                reads.push(limit.passes_a_second()?);
            }
        }
        let tps = median(&mut rates);
        let share = (!reads.is_empty()).then(|| tps / median(&mut reads));
        if args.jsonl {
            let mut line = json!({ "test": test.name(), "tps": round(tps) });
            if let (Some(share), Some(limit)) = (share, &limit) {
                line["bytes_a_token"] = json!(limit.loops.len_bytes());
                line["share_of_read_loop"] = json!((share * 1e3).round() / 1e3);
            }
            say(&format!("{line}\n"))?;
        } else {
            let share = share.map_or_else(String::new, |share| format!("  {:.0} % of reading alone", 100.0 * share));
            table.push((test.name(), format!("{tps:.1}"), share));
        }
    }
    if !args.jsonl {
        let width = table.iter().map(|row| row.0.len()).max().unwrap_or(0);
        for (name, rate, share) in table {
            say(&format!("{name:width$}  {rate:>8}{share}\n"))?;
        }
        if let Some(limit) = &limit {
            host.voice.note(format_args!("{:.1} MB of weights a token", limit.loops.len_bytes() as f64 / 1e6));
        }
        if let Some(peak_bytes) = memory.or_else(peak_memory_bytes) {
            host.voice.note(format_args!("peak memory {:.0} MiB", peak_bytes as f64 / (1 << 20) as f64));
        }
    }
    Ok(())
}

/// A loop that only reads as many bytes as the weights of a token take, on as many threads.
struct Limit {
    loops: ReadLoop,
}

impl Limit {
    /// For a model whose layers all run on the CPU.
    fn of(plan: &Plan) -> Result<Option<Self>, CliError> {
        if plan.choice.route.name() != npuhal_cpu::route::NAME {
            return Ok(None);
        }
        let of_layers = plan.model.tensors().filter(|(role, _)| matches!(role, TensorRole::Layer(..)));
        let bytes = of_layers.map(|(_, tensor)| tensor.bytes().len()).sum::<usize>();
        let bytes = bytes + plan.model.head()?.bytes().len();
        let threads = plan.options.threads.or_else(|| std::thread::available_parallelism().ok());
        let threads = threads.map_or(1, NonZeroUsize::get);
        let loops = ReadLoop::new(bytes, threads).map_err(|error| {
            let route = npuhal_cpu::route::NAME.to_owned();
            RouteError::Backend { route, source: error.into() }
        })?;
        Ok(Some(Self { loops }))
    }

    /// For about as long as a decode test's round.
    fn passes_a_second(&self) -> Result<f64, CliError> {
        let (started, mut passes) = (Instant::now(), 0u32);
        while passes < 2 || started.elapsed() < READ_TIME {
            self.loops.run().map_err(RunError::from)?;
            passes += 1;
        }
        Ok(f64::from(passes) / started.elapsed().as_secs_f64().max(f64::MIN_POSITIVE))
    }
}

/// Positions of the largest test.
pub(super) fn needed_positions(args: &BenchArgs) -> Result<u32, CliError> {
    let deepest = args.depths.iter().copied().max().unwrap_or(0);
    let deepest = deepest.checked_add(args.tg).ok_or_else(|| {
        CliError::Usage(format!("--depths {deepest} and --tg {} are more positions than can be counted", args.tg))
    })?;
    Ok(args.pp.iter().copied().fold(deepest.max(WARM_UP_TOKENS), u32::max))
}

/// Time from the start of the command to the first token.
fn first_token(host: &Host, args: &BenchArgs, started: Instant) -> Result<(), CliError> {
    let plan = plan(host, &args.model)?;
    let window = plan.choice.service.window;
    let (ids, what) = match &args.ttft_text {
        Some(text) => {
            let tokenizer = plan.tokenizer(host)?;
            let ids = message_ids(&plan.model, &tokenizer, text)?;
            check_window("--ttft-text", ids.len(), window)?;
            (ids, "ttft-text")
        }
        None => {
            let tokens = args.ttft.unwrap_or(1);
            check_window("--ttft", tokens as usize, window)?;
            (ids(tokens, plan.model.config().vocab_size), "ttft")
        }
    };
    let mut stepper = stepper(&plan)?;
    let mut bed = Bed::new(stepper.as_mut(), &host.control);
    let elapsed = bed.within(|bed| {
        bed.run(&ids, 0)?;
        Ok(started.elapsed())
    })?;
    let elapsed_ms = elapsed.as_secs_f64() * 1e3;
    let line = json!({
        "test": format!("{what}{}", ids.len()),
        "ms": round(elapsed_ms),
        "peak_rss_bytes": peak_memory_bytes(),
    });
    Ok(say(&format!("{line}\n"))?)
}

fn check_window(flag: &str, tokens: usize, window: u32) -> Result<(), CliError> {
    if tokens <= window as usize {
        return Ok(());
    }
    Err(CliError::Usage(format!("{flag}: {tokens} tokens; the context has {window} positions")))
}

#[derive(Clone, Copy)]
enum Test {
    Prefill { tokens: u32 },
    Decode { depth: u32, tokens: u32 },
}

impl Test {
    fn tokens(self) -> u32 {
        match self {
            Self::Prefill { tokens } | Self::Decode { tokens, .. } => tokens,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Prefill { tokens } => format!("pp{tokens}"),
            Self::Decode { depth, tokens } => format!("tg{tokens}@d{depth}"),
        }
    }
}

fn tests(args: &BenchArgs) -> Vec<Test> {
    let prefill = args.pp.iter().map(|&tokens| Test::Prefill { tokens });
    let decode = args.depths.iter().map(|&depth| Test::Decode { depth, tokens: args.tg });
    prefill.chain(decode).collect()
}

/// A stepper under measurement.
struct Bed<'a> {
    stepper: &'a mut dyn Stepper,
    logits: HiddenRows,
    control: &'a Control,
}

impl<'a> Bed<'a> {
    fn new(stepper: &'a mut dyn Stepper, control: &'a Control) -> Self {
        Self { stepper, logits: HiddenRows::new(), control }
    }

    /// A fresh cache, `tokens` ids in one forward, one argmax.
    fn prefill(&mut self, tokens: u32) -> Result<Duration, CliError> {
        let ids = ids(tokens, self.stepper.vocab_size());
        self.within(|bed| {
            let started = Instant::now();
            bed.run(&ids, 0)?;
            Ok(started.elapsed())
        })
    }

    /// A fresh cache, `depth` ids prefilled outside the time, then `tokens` single steps, each argmax feeding the next.
    fn decode(&mut self, depth: u32, tokens: u32) -> Result<Duration, CliError> {
        let ids = ids(depth.max(1), self.stepper.vocab_size());
        self.within(|bed| {
            let mut token = ids[0];
            if depth > 0 {
                token = bed.run(&ids, 0)?;
            }
            let started = Instant::now();
            for step in 0..tokens {
                token = bed.run(&[token], depth + step)?;
            }
            Ok(started.elapsed())
        })
    }

    fn within(&mut self, work: impl FnOnce(&mut Self) -> Result<Duration, CliError>) -> Result<Duration, CliError> {
        self.stepper.begin()?;
        self.stepper.truncate(SequenceId(0), 0);
        let result = work(self);
        self.stepper.end();
        result
    }

    /// One forward of `ids` from position `from`, and the argmax of its last row.
    fn run(&mut self, ids: &[TokenId], from: u32) -> Result<TokenId, CliError> {
        let sequence = SequenceId(0);
        let rows: Vec<Row> = (from..).zip(ids).map(|(position, &token)| Row { sequence, token, position }).collect();
        self.stepper.step(&rows, Want::Last, &mut self.logits, self.control)?;
        Ok(greedy(self.logits.row(0))?)
    }
}

pub(super) fn stepper(plan: &Plan) -> Result<Box<dyn Stepper>, CliError> {
    match plan.open()? {
        Session::Stepper(stepper) => Ok(stepper),
        Session::Generator(_) => {
            Err(CliError::Usage("this route chooses tokens itself; bench measures routes that yield logits".to_owned()))
        }
    }
}

/// Ids of a linear congruential generator: `s = s·6364136223846793005 + 1442695040888963407` from 42, id = `(s >> 33) mod
/// vocabulary`.
pub(super) fn ids(count: u32, vocab_size: usize) -> Vec<TokenId> {
    let mut state = 42u64;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % vocab_size.max(1) as u64) as TokenId
        })
        .collect()
}

pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

pub(super) fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    #[test]
    fn ids_follow_the_stated_generator() {
        // From the recurrence, computed apart from it.
        let first = 42u128 * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407;
        let first = (first & u128::from(u64::MAX)) as u64;
        assert_eq!(ids(1, 49152), [((first >> 33) % 49152) as u32]);
        assert!(ids(1000, 151_936).iter().all(|&id| id < 151_936));
    }

    #[test]
    fn depths_near_the_end_of_numbers_are_a_usage_error_and_wrap_nothing() {
        let parse = |depths: &str| {
            let cli = Cli::try_parse_from(["npuhal", "bench", "--pp", "4", "--tg", "2", "--depths", depths]).unwrap();
            match cli.command {
                Command::Bench(args) => needed_positions(&args),
                _ => unreachable!("bench was asked for"),
            }
        };
        assert_eq!(parse("0,510").unwrap(), 512);
        assert_eq!(parse("0").unwrap(), WARM_UP_TOKENS);
        assert_eq!(parse("4294967295").unwrap_err().exit_code(), 2);
    }

    #[test]
    fn the_median_of_an_even_count_is_between_the_middle_two() {
        assert_eq!(median(&mut [4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
    }
}
