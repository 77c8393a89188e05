//! `npuhal bench --parallel`: several sequences as rows of one forward pass, against one sequence in the same rounds.

use crate::Host;
use crate::args::BenchArgs;
use crate::command::bench::{ids, median, needed_positions, round, stepper};
use crate::error::CliError;
use crate::session::plan;
use crate::terminal::{bytes_text, say};
use npuhal_core::stage::{Control, HiddenRows, Row, SequenceId, Stepper, TokenId, Want};
use npuhal_models::sampling::greedy;
use serde_json::json;
use std::time::{Duration, Instant};

pub(crate) fn parallel(host: &Host, args: &BenchArgs) -> Result<(), CliError> {
    let mut args = args.clone();
    // Sizes of prefill are not measured here.
    args.pp.clear();
    let most = args.parallel.iter().copied().max().unwrap_or(1);
    let needed = needed_positions(&args)?;
    let session = &mut args.model.session;
    session.sequences = Some(most);
    session.context = Some(session.context.unwrap_or(0).max(needed));
    let plan = plan(host, &args.model)?;
    let service = &plan.choice.service;
    if let Some(bytes) = service.memory_bytes {
        host.voice.note(format_args!(
            "weights and KV caches of {most} sequences of {} positions: at most {}",
            service.window,
            bytes_text(bytes)
        ));
    }
    let mut stepper = stepper(&plan)?;
    let held = stepper.capacity().sequences;
    if held < most {
        let message = format!("the route {} holds {held} sequences side by side, not {most}", plan.choice.route.name());
        return Err(CliError::Usage(message));
    }
    let mut bed = Bed { stepper: stepper.as_mut(), logits: HiddenRows::new(), control: &host.control };
    bed.decode(most, 0, 2)?;
    let mut table = vec![["TEST".to_owned(), "TOK/S".to_owned(), "RATIO TO ONE".to_owned()]];
    for &depth in &args.depths {
        for &sequences in &args.parallel {
            let (mut rates, mut ratios) = (Vec::new(), Vec::new());
            for _ in 0..args.rounds {
                let rate = |sequences: u32, took: Duration| {
                    f64::from(sequences * args.tg) / took.as_secs_f64().max(f64::MIN_POSITIVE)
                };
                let one = rate(1, bed.decode(1, depth, args.tg)?);
                let all = rate(sequences, bed.decode(sequences, depth, args.tg)?);
                rates.push(all);
                ratios.push(all / one);
            }
            let (tps, ratio) = (median(&mut rates), median(&mut ratios));
            let name = format!("tg{}x{sequences}@d{depth}", args.tg);
            if args.jsonl {
                let line = json!({ "test": name, "sequences": sequences, "tps": round(tps), "ratio": round(ratio) });
                say(&format!("{line}\n"))?;
            } else {
                table.push([name, format!("{tps:.1}"), format!("{ratio:.2}")]);
            }
        }
    }
    if !args.jsonl {
        let width = table.iter().map(|row| row[0].len()).max().unwrap_or(0);
        for [name, rate, ratio] in table {
            say(&format!("{name:width$}  {rate:>8}  {ratio:>12}\n"))?;
        }
    }
    Ok(())
}

/// A stepper under measurement.
struct Bed<'a> {
    stepper: &'a mut dyn Stepper,
    logits: HiddenRows,
    control: &'a Control,
}

impl Bed<'_> {
    /// Fresh caches, `depth` ids of each sequence prefilled outside the time, then `tokens` steps of one row a sequence, each
    /// argmax feeding the next.
    fn decode(&mut self, sequences: u32, depth: u32, tokens: u32) -> Result<Duration, CliError> {
        self.stepper.begin()?;
        (0..self.stepper.capacity().sequences).for_each(|id| {
            self.stepper.truncate(SequenceId(id), 0);
        });
        let result = self.run(sequences, depth, tokens);
        self.stepper.end();
        result
    }

    fn run(&mut self, sequences: u32, depth: u32, tokens: u32) -> Result<Duration, CliError> {
        // Every sequence has ids of its own.
        let all = ids(sequences.saturating_mul(depth.max(1)), self.stepper.vocab_size());
        let mut next: Vec<TokenId> = Vec::new();
        for (sequence, ids) in (0..sequences).zip(all.chunks(depth.max(1) as usize)) {
            if depth == 0 {
                next.push(ids[0]);
                continue;
            }
            let sequence = SequenceId(sequence);
            let rows: Vec<Row> = (0..).zip(ids).map(|(position, &token)| Row { sequence, token, position }).collect();
            self.stepper.step(&rows, Want::Last, &mut self.logits, self.control)?;
            next.push(greedy(self.logits.row(0))?);
        }
        let started = Instant::now();
        for step in 0..tokens {
            let rows = (0..).zip(&next);
            let row = |(sequence, &token)| Row { sequence: SequenceId(sequence), token, position: depth + step };
            let rows: Vec<Row> = rows.map(row).collect();
            self.stepper.step(&rows, Want::All, &mut self.logits, self.control)?;
            for (index, next) in next.iter_mut().enumerate() {
                *next = greedy(self.logits.row(index))?;
            }
        }
        Ok(started.elapsed())
    }
}
