//! An add-on that panics where its option says so: material of this crate's tests.

use npuhal_addon::prelude::*;
use std::io::Write;

npuhal_addon::register_route!(Panics);
npuhal_addon::register_command!(PanicCommand);
npuhal_addon::register_encoder!(PanicEncoder);
npuhal_addon::export!();

struct Panics;

fn panic_at(place: &str, options: &Options) {
    if options.route_options.get("panic").is_some_and(|wanted| wanted == place) {
        // As a panic, but without its report on stderr.
        std::panic::resume_unwind(Box::new(format!("at the {place}")));
    }
}

/// Thrown by the command; panics itself when it is dropped.
struct Grenade;

impl Drop for Grenade {
    fn drop(&mut self) {
        std::panic::resume_unwind(Box::new(()));
    }
}

impl Route for Panics {
    fn name(&self) -> &str {
        "panics"
    }

    fn model_types(&self) -> &[&str] {
        &["llama"]
    }

    fn option_keys(&self) -> &[&str] {
        &["panic", "session", "witness"]
    }

    fn fitness(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Fitness {
        panic_at("fitness", options);
        find_device(devices, Generation::Cpu).map_or_else(
            || unavailable("there is no CPU"),
            |card| {
                let detail = format!("{} {}", model.config().name, card.features.len());
                Fitness::Serves(Service { detail, memory_bytes: Some(7), ..service(card, model, 64) })
            },
        )
    }

    fn open(&self, request: OpenRequest<'_>) -> Result<Session, RouteError> {
        panic_at("open", request.options);
        assert_eq!(request.service.window, 64);
        if request.options.route_options.get("session").is_some_and(|kind| kind == "host") {
            request.host.open_device("cpu")?;
        }
        let open = Open { options: request.options.clone(), vocab_size: request.model.config().vocab_size };
        Ok(match request.options.route_options.get("session").map(String::as_str) {
            Some("generator") => Session::Generator(Box::new(open)),
            _ => Session::Stepper(Box::new(open)),
        })
    }
}

struct Open {
    options: Options,
    vocab_size: usize,
}

impl Drop for Open {
    fn drop(&mut self) {
        if let Some(file) = self.options.route_options.get("witness") {
            let _ = std::fs::write(file, "dropped");
        }
        if !std::thread::panicking() {
            panic_at("drop", &self.options);
        }
    }
}

impl Stepper for Open {
    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn capacity(&self) -> SegmentCapacity {
        SegmentCapacity { positions: 64, rows_per_call: 4, sequences: 1 }
    }

    fn placement(&self) -> Vec<Placement> {
        Vec::new()
    }

    fn begin(&mut self) -> Result<(), RunError> {
        panic_at("begin", &self.options);
        Ok(())
    }

    fn end(&mut self) {
        panic_at("end", &self.options);
    }

    fn step(
        &mut self,
        rows: &[Row],
        want: Want<'_>,
        logits: &mut HiddenRows,
        control: &Control,
    ) -> Result<(), RunError> {
        panic_at("step", &self.options);
        if self.options.route_options.get("panic").is_some_and(|place| place == "none: wait") {
            while control.check().is_ok() {
                std::thread::yield_now();
            }
        }
        control.check()?;
        let width = if self.options.route_options.contains_key("panic") { self.vocab_size } else { 3 };
        logits.reset(want.count(rows.len()), width);
        Ok(())
    }

    fn truncate(&mut self, _: SequenceId, len: usize) -> usize {
        panic_at("truncate", &self.options);
        len
    }
}

impl Generator for Open {
    fn max_context(&self) -> u32 {
        64
    }

    fn default_repetition_penalty(&self) -> f32 {
        1.5
    }

    fn opens_think(&self) -> bool {
        true
    }

    fn describe(&self) -> String {
        "talks".to_owned()
    }

    fn generate(
        &mut self,
        request: &GeneratorRequest<'_>,
        on_token: &mut dyn FnMut(TokenId) -> bool,
        _: &Control,
    ) -> Result<GeneratorOutcome, RunError> {
        panic_at("generate", &self.options);
        let tokens: Vec<TokenId> = request.prompt.iter().copied().take_while(|&token| on_token(token)).collect();
        Ok(GeneratorOutcome { tokens, prefill_ms: 1.0, decode_ms: 2.0, stopped_at_eos: true, reused: 1 })
    }
}

struct PanicCommand;

impl Command for PanicCommand {
    fn name(&self) -> &str {
        "panic"
    }

    fn run(&self, arguments: &[String], output: &mut dyn Write) -> Result<u8, ExtensionError> {
        write!(output, "{}", arguments.len())?;
        if arguments.is_empty() {
            std::panic::panic_any(Grenade);
        }
        panic!("in the command")
    }
}

struct PanicEncoder;

impl Encoder for PanicEncoder {
    fn name(&self) -> &str {
        "panic"
    }

    fn dims(&self) -> usize {
        2
    }

    fn encode(&self, text: &str) -> Result<Vec<f32>, ExtensionError> {
        assert!(!text.is_empty(), "in the encoder");
        Ok(vec![text.len() as f32; if text == "three" { 3 } else { 2 }])
    }
}
