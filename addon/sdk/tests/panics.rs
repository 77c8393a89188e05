//! Both sides of the border together: traits here, traits there, and panics that become errors.

use npuhal_addon::core::RunError;
use npuhal_addon::core::stage::{
    Control, Generator, GeneratorRequest, HiddenRows, Row, SequenceId, Session, Stepper, Want,
};
use npuhal_addon::models::ModelSource;
use npuhal_addon::models::tensor::WeightType;
use npuhal_addon::registry::selection::RouteOutcome;
use npuhal_addon::registry::{Choice, Registry, Request, select};
use npuhal_cpu as _;
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// The example `panics`, which `cargo test` has built beside this test, in a folder that only its owner can write to, as npuhal
/// wants it; the build folder may be another.
fn library() -> &'static Path {
    static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| {
        let built = std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("examples/libpanics.so");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("addons");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::set_permissions(&folder, Permissions::from_mode(0o700)).unwrap();
        let own = folder.join(format!("libpanics-{}.so", std::process::id()));
        std::fs::copy(built, &own).expect("cargo test -p npuhal-addon builds the examples");
        std::fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
        // Another process may have the file open: it keeps the one that it opened.
        let file = folder.join("libpanics.so");
        std::fs::rename(own, &file).unwrap();
        file
    });
    &LIBRARY
}

struct Bed {
    registry: Registry,
    model: ModelSource,
    folder: tempfile::TempDir,
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let spec = ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32));
        spec.build().write(&path).unwrap();
        let mut registry = Registry::collect(&["npuhal-cpu"]).unwrap();
        assert_eq!(registry.load_addons(&[library().to_owned()]), []);
        Self { registry, model: ModelSource::open(&path).unwrap(), folder }
    }

    fn witness(&self) -> PathBuf {
        self.folder.path().join("witness")
    }

    /// Whether a session has been dropped on the other side since this was last asked.
    fn is_dropped(&self) -> bool {
        std::fs::remove_file(self.witness()).is_ok()
    }

    fn choose(&self, options: &[&str]) -> (Choice, Request) {
        let mut request = Request::default();
        let witness = format!("witness={}", self.witness().display());
        for option in options.iter().copied().chain([witness.as_str()]) {
            request.options.set_route_pair(option, &self.registry.option_keys()).unwrap();
        }
        (select(&self.registry, &self.model, &request).unwrap(), request)
    }

    fn open(&self, options: &[&str]) -> Result<Session, String> {
        let (choice, request) = self.choose(options);
        assert_eq!(choice.route.name(), "panics", "{}", choice.decision.line());
        choice.open(&self.registry, &self.model, &request.options).map_err(|error| error.to_string())
    }

    fn stepper(&self, options: &[&str]) -> Box<dyn Stepper> {
        match self.open(options).unwrap() {
            Session::Stepper(stepper) => stepper,
            Session::Generator(_) => panic!("wanted a stepper"),
        }
    }

    fn generator(&self, options: &[&str]) -> Box<dyn Generator> {
        match self.open(options).unwrap() {
            Session::Generator(generator) => generator,
            Session::Stepper(_) => panic!("wanted a generator"),
        }
    }
}

const ROW: Row = Row { sequence: SequenceId(0), token: 1, position: 0 };

#[test]
fn a_service_comes_over_the_border_as_it_was_given() {
    let bed = Bed::new();
    let (choice, _) = bed.choose(&[]);
    let service = &choice.service;
    assert_eq!((service.window, service.memory_bytes, service.placement.len()), (64, Some(7), 1));
    assert!(service.detail.starts_with("small llama "), "{}", service.detail);
    assert_eq!(service.placement[0].layers, 0..2);
}

#[test]
fn panics_of_the_route_become_reasons_and_errors() {
    let bed = Bed::new();
    let (choice, _) = bed.choose(&["panic=fitness"]);
    assert_eq!(choice.route.name(), "cpu");
    let line = choice.decision.line();
    assert!(line.contains("it panicked: at the fitness") && line.contains("libpanics.so"), "{line}");
    assert!(matches!(choice.decision.routes[0].outcome, RouteOutcome::Declined(_)));
    let message = bed.open(&["panic=open"]).err().unwrap();
    assert!(message.contains("it panicked: at the open") && message.contains("libpanics.so"), "{message}");
    let message = bed.open(&["session=host"]).err().unwrap();
    assert!(message.contains("a loaded add-on cannot open the device cpu of npuhal"), "{message}");
}

#[test]
fn panics_of_a_stepper_break_its_session_only() {
    let bed = Bed::new();
    let mut logits = HiddenRows::new();
    for place in ["begin", "step"] {
        let mut stepper = bed.stepper(&[&format!("panic={place}")]);
        let mut call = |stepper: &mut dyn Stepper| {
            stepper.begin().and_then(|()| stepper.step(&[ROW], Want::Last, &mut logits, &Control::new()))
        };
        let message = call(stepper.as_mut()).unwrap_err().to_string();
        assert!(message.contains(&format!("it panicked: at the {place}")), "{message}");
        let again = call(stepper.as_mut()).unwrap_err().to_string();
        assert!(again.contains("the session is broken since"), "{again}");
        drop(stepper);
        assert!(bed.is_dropped(), "after a panic at the {place}");
    }
    let mut stepper = bed.stepper(&["panic=truncate"]);
    assert_eq!(stepper.truncate(SequenceId(0), 3), 0);
    assert!(stepper.begin().is_err());
    drop(stepper);
    assert!(bed.is_dropped(), "after a panic at the truncation");
    for place in ["end", "drop"] {
        let mut stepper = bed.stepper(&[&format!("panic={place}")]);
        stepper.step(&[ROW], Want::Last, &mut logits, &Control::new()).unwrap();
        assert_eq!((logits.rows(), logits.width()), (1, bed.model.config().vocab_size));
        stepper.end();
    }
    assert!(bed.is_dropped(), "a sound session");
    let message = bed.stepper(&[]).step(&[ROW], Want::Last, &mut logits, &Control::new()).unwrap_err().to_string();
    assert!(message.contains("wanted 266 logits, found 3"), "{message}");
}

#[test]
fn cancellation_and_deadline_are_seen_on_the_other_side() {
    let bed = Bed::new();
    let mut stepper = bed.stepper(&["panic=none: wait"]);
    let mut logits = HiddenRows::new();
    let soon = Control::until(Instant::now() + Duration::from_millis(30));
    let error = stepper.step(&[ROW], Want::Last, &mut logits, &soon).unwrap_err();
    assert!(matches!(error, RunError::DeadlinePassed), "{error}");
    let control = Control::new();
    let other = control.clone();
    let canceller = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        other.cancel();
    });
    let error = stepper.step(&[ROW], Want::Last, &mut logits, &control).unwrap_err();
    assert!(matches!(error, RunError::Cancelled), "{error}");
    canceller.join().unwrap();
}

#[test]
fn a_generator_speaks_and_its_panics_are_caught() {
    let bed = Bed::new();
    let request = GeneratorRequest { prompt: &[5, 6, 7], max_tokens: 9, repetition_penalty: 1.0, penalty_window: 64 };
    let mut generator = bed.generator(&["session=generator"]);
    assert_eq!((generator.default_repetition_penalty(), generator.opens_think()), (1.5, true));
    assert_eq!((generator.describe(), generator.max_context()), ("talks".to_owned(), 64));
    let mut seen = 0;
    let mut two = |_| {
        seen += 1;
        seen < 2
    };
    let outcome = generator.generate(&request, &mut two, &Control::new()).unwrap();
    assert_eq!((outcome.tokens, outcome.stopped_at_eos, outcome.reused), (vec![5, 6], true, 1));
    assert_eq!((outcome.prefill_ms, outcome.decode_ms), (1.0, 2.0));
    let mut generator = bed.generator(&["session=generator", "panic=generate"]);
    let message = generator.generate(&request, &mut |_| true, &Control::new()).unwrap_err().to_string();
    assert!(message.contains("it panicked: at the generate"), "{message}");
    drop(generator);
    assert!(bed.is_dropped(), "after a panic of the generation");
    // A panic of the host's own receiver goes round the library and on behind it.
    let mut generator = bed.generator(&["session=generator"]);
    let call = std::panic::AssertUnwindSafe(|| {
        let _ = generator.generate(&request, &mut |_| panic!("the receiver"), &Control::new());
    });
    assert_eq!(std::panic::catch_unwind(call).unwrap_err().downcast_ref::<&str>(), Some(&"the receiver"));
}

#[test]
fn panics_of_commands_and_encoders_are_errors() {
    let bed = Bed::new();
    let mut output = Vec::new();
    let command = &bed.registry.command("panic").unwrap().command;
    let message = command.run(&["a".to_owned(), "b".to_owned()], &mut output).unwrap_err().to_string();
    assert!(message.contains("it panicked: in the command"), "{message}");
    let thrown = command.run(&[], &mut output).unwrap_err().to_string();
    assert!(thrown.contains("it panicked: with a value that is no text"), "{thrown}");
    assert_eq!(output, b"20");
    let encoder = &bed.registry.encoder("panic").unwrap().encoder;
    assert_eq!(encoder.encode("four").unwrap(), [4.0, 4.0]);
    for (text, wanted) in [("", "it panicked: in the encoder"), ("three", "a vector of 3 elements; wanted 2")] {
        let message = encoder.encode(text).unwrap_err().to_string();
        assert!(message.contains(wanted), "{message}");
    }
}
