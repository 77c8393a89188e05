//! The sampling that a model's authors suggest: followed where the user does not say otherwise.

use crate::Host;
use crate::args::GenerationArgs;
use npuhal_models::generate::TextGenerator;
use npuhal_models::sampling::{SamplingParams, SuggestedSampling};

/// What is taken where a flag is not given; said where it makes a difference. A route that chooses tokens itself cannot
/// follow a suggestion.
pub(crate) fn follow(
    host: &Host,
    suggested: Option<&SuggestedSampling>,
    args: &GenerationArgs,
    generator: &TextGenerator,
) -> SamplingParams {
    match (suggested, generator) {
        (Some(suggested), TextGenerator::Stepper(_)) => {
            if let Some(line) = told(args, suggested) {
                host.voice.note(line);
            }
            suggested.params.clone()
        }
        _ => SamplingParams::default(),
    }
}

/// What to say of a suggestion under `args`; nothing where it changes nothing.
fn told(args: &GenerationArgs, suggested: &SuggestedSampling) -> Option<String> {
    let params = args.sampling(&suggested.params);
    if !params.draws() && !params.penalizes() || params == args.sampling(&SamplingParams::default()) {
        return None;
    }
    let greedy = if params.draws() { "; --temperature 0 takes the best token" } else { "" };
    let in_effect = SuggestedSampling { params, left_out: Vec::new() };
    Some(format!("sampling with what the model's authors suggest: {in_effect}{greedy}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn said(flags: &[&str]) -> Option<String> {
        let args = match Cli::try_parse_from(["npuhal", "run", "hi"].iter().chain(flags)).unwrap().command {
            Command::Run(args) => args.generation,
            other => panic!("{other:?}"),
        };
        let params = SamplingParams { temperature: 0.6, top_p: 0.95, top_k: 20, ..SamplingParams::default() };
        told(&args, &SuggestedSampling { params, left_out: Vec::new() })
    }

    #[test]
    fn flags_win_over_a_suggestion_one_by_one() {
        let line = said(&[]).unwrap();
        assert!(line.contains("suggest: temperature 0.6, top-p 0.95, top-k 20; --temperature 0"), "{line}");
        let line = said(&["--top-p", "1", "--temperature", "0.9"]).unwrap();
        assert!(line.contains("suggest: temperature 0.9, top-k 20;"), "{line}");
        assert_eq!(said(&["--temperature", "0"]), None, "greedy, whatever else is suggested");
        assert_eq!(said(&["--top-k", "1"]), None, "greedy too");
        assert_eq!(said(&["--temperature", "0.9", "--top-p", "0.5", "--top-k", "0"]), None, "nothing of it is left");
    }
}
