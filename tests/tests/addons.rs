//! Loaded add-ons: every fault of a library is an error that names its file, and the host goes on.

#![allow(clippy::print_stdout, reason = "a test that is left out says so")]

use npuhal_core::RunError;
use npuhal_core::stage::{Control, GeneratorRequest, HiddenRows, Row, SequenceId, Session, Stepper, Want};
use npuhal_models::{ModelSource, WeightType};
use npuhal_registry::selection::RouteOutcome;
use npuhal_registry::{AddonError, Registry, Request, select};
use npuhal_tests::kit::model::{Architecture, ModelSpec, Weights};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

use npuhal_cpu as _;

/// Compiles add-ons in a folder of its own.
struct Workshop {
    folder: TempDir,
    made: std::cell::Cell<usize>,
}

impl Workshop {
    /// `None`, and a line that says so, where there is no C compiler.
    fn open(test: &str) -> Option<Self> {
        if Command::new("cc").arg("--version").output().is_err() {
            println!("skipped: {test}: cc is not here");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
        Some(Self { folder, made: std::cell::Cell::new(0) })
    }

    /// A library from `faulty.c` with `defines`. Each is a file of its own: the system's loader knows a file it has opened.
    fn make(&self, defines: &[&str]) -> PathBuf {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        self.made.set(self.made.get() + 1);
        let library = self.folder.path().canonicalize().unwrap().join(format!("faulty{}.so", self.made.get()));
        let output = Command::new("cc")
            .args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused", "-O1", "-shared", "-fPIC", "-I"])
            .arg(root.join("../addon/abi/include"))
            .args(defines.iter().map(|define| format!("-D{define}")))
            .arg("-o")
            .arg(&library)
            .arg(root.join("data/addons/faulty.c"))
            .output()
            .unwrap();
        assert!(output.status.success(), "{defines:?}: {}", String::from_utf8_lossy(&output.stderr));
        fs::set_permissions(&library, Permissions::from_mode(0o755)).unwrap();
        library
    }

    /// A registry with the CPU and the library; the library is loaded without an error.
    fn load(&self, defines: &[&str]) -> (Registry, PathBuf) {
        let library = self.make(defines);
        let mut registry = registry();
        assert_eq!(registry.load_addons(std::slice::from_ref(&library)), [], "{defines:?}");
        (registry, library)
    }

    fn model(&self) -> ModelSource {
        let path = self.folder.path().join("model.gguf");
        let spec = ModelSpec::small(Architecture::Llama, Weights::Uniform(WeightType::F32));
        spec.build().write(&path).unwrap();
        ModelSource::open(&path).unwrap()
    }
}

fn registry() -> Registry {
    Registry::collect(&["npuhal-cpu"]).unwrap()
}

/// The session that the first loaded route opens.
fn open(registry: &Registry, model: &ModelSource) -> Result<Session, String> {
    let request = Request::default();
    let choice = select(registry, model, &request).map_err(|error| error.to_string())?;
    assert_eq!(choice.route.name(), "route", "{:?}", choice.decision);
    choice.open(registry, model, &request.options).map_err(|error| error.to_string())
}

fn stepper(registry: &Registry, model: &ModelSource) -> Box<dyn Stepper> {
    match open(registry, model).unwrap() {
        Session::Stepper(stepper) => stepper,
        Session::Generator(_) => panic!("wanted a stepper"),
    }
}

/// Sessions that the library holds open: its subcommand tells.
fn open_sessions(registry: &Registry) -> u8 {
    registry.command("command").unwrap().command.run(&[], &mut Vec::new()).unwrap()
}

fn rows(count: u32) -> Vec<Row> {
    (0..count).map(|position| Row { sequence: SequenceId(0), token: 3 * position, position }).collect()
}

#[test]
fn a_table_that_is_not_as_it_should_be_is_refused() {
    let Some(workshop) = Workshop::open("a_table_that_is_not_as_it_should_be_is_refused") else { return };
    let cases: &[(&str, &str)] = &[
        ("ENTRY=another_entry", "exports no function npuhal_addon_entry"),
        ("IN_ENTRY=return NULL", "its entry returned no table"),
        ("IN_ENTRY=return (const void *)((char *)&table + 1)", "table: its address is not aligned"),
        ("IN_ENTRY=table.abi_version = 7", "built for version 7 of the add-on interface; this npuhal has version 1"),
        ("IN_ENTRY=table.size_bytes = 8", "table: it states a size of 8 bytes; wanted"),
        ("IN_ENTRY=table.name.data = NULL", "name: a null pointer to 6 elements"),
        ("IN_ENTRY=table.name.len = (size_t)1 << 60", "name: 1152921504606846976 elements; at most 64 are taken"),
        ("IN_ENTRY=table.name.len = 0", "name: \"\" is no name"),
        ("NAME=NPUHAL_TEXT(\"\\xff\")", "name: it is not UTF-8"),
        ("NAME=NPUHAL_TEXT(\"a b\")", "name: \"a b\" is no name"),
        ("IN_ENTRY=table.version.data = (const uint8_t *)\"1\\n0\"", "version: it has control characters"),
        ("IN_ENTRY=table.routes = NULL", "routes: a null pointer to 1 elements"),
        ("IN_ENTRY=table.routes_len = 100000", "routes: 100000 elements; at most 256 are taken"),
        (
            "IN_ENTRY=table.routes = (const void *)((char *)routes + 4)",
            "routes: the address of its elements is not aligned",
        ),
        ("IN_ENTRY=table.commands = NULL", "commands: a null pointer to 1 elements"),
        ("IN_ENTRY=table.encoders = NULL", "encoders: a null pointer to 1 elements"),
        ("IN_ENTRY=routes[0].size_bytes = 0", "route 0, size: it states a size of 0 bytes; wanted"),
        ("IN_ENTRY=routes[0].flags = 6", "route 0, flags: 0x6 has unknown bits"),
        ("IN_ENTRY=routes[0].name.data = NULL", "route 0, name: a null pointer"),
        ("ROUTE_NAME=NPUHAL_TEXT(\"\\xc3\")", "route 0, name: it is not UTF-8"),
        ("ROUTE_NAME=NPUHAL_TEXT(\"a\\tb\")", "route 0, name: \"a\\tb\" is no name"),
        ("IN_ENTRY=routes[0].model_types = NULL", "route 0, model types: a null pointer"),
        ("IN_ENTRY=routes[0].model_types_len = 0", "route 0, model types: there is none"),
        ("MODEL_TYPE=NPUHAL_TEXT(\"\")", "route 0, model type: \"\" is no name"),
        ("IN_ENTRY=routes[0].options = NULL", "route 0, options: a null pointer"),
        ("OPTION_KEY=NPUHAL_TEXT(\"a=b\")", "route 0, option key: 'a=b' has an equals sign"),
        ("OPTION_KEY=NPUHAL_TEXT(\"\")", "route 0, option key: \"\" is no name"),
        ("IN_ENTRY=routes[0].fitness = NULL", "route 0, fitness: a null pointer where a function is wanted"),
        ("IN_ENTRY=routes[0].open = NULL", "route 0, open: a null pointer where a function is wanted"),
        ("IN_ENTRY=routes[1].open = NULL; table.routes_len = 2", "route 1, open: a null pointer"),
        (
            "IN_ENTRY=routes[1].name = routes[0].name; table.routes_len = 2",
            "the route 'route' is registered twice: by loaded add-on",
        ),
        ("COMMAND_NAME=NPUHAL_TEXT(\"Run\")", "command 0, name: \"Run\" is no command"),
        ("COMMAND_NAME=NPUHAL_TEXT(\"--help\")", "command 0, name: \"--help\" is no command"),
        ("COMMAND_NAME=NPUHAL_TEXT(\"reserved\")", "the command 'reserved' of the loaded add-on"),
        ("IN_ENTRY=commands[0].size_bytes = 1", "command 0, size: it states a size of 1 bytes"),
        ("IN_ENTRY=commands[0].run = NULL", "command 0, run: a null pointer where a function is wanted"),
        ("IN_ENTRY=encoders[0].size_bytes = 1", "encoder 0, size: it states a size of 1 bytes"),
        ("IN_ENTRY=encoders[0].dims = 0", "encoder 0, dims: 0; wanted 1 to 1048576"),
        ("IN_ENTRY=encoders[0].dims = 0xffffffff", "encoder 0, dims: 4294967295; wanted 1 to 1048576"),
        ("IN_ENTRY=encoders[0].encode = NULL", "encoder 0, encode: a null pointer where a function is wanted"),
    ];
    for (define, wanted) in cases {
        let library = workshop.make(&[define]);
        let mut registry = registry();
        registry.reserve_commands(["reserved".to_owned()]).unwrap();
        let errors = registry.load_addons(std::slice::from_ref(&library));
        let message = errors.first().map(ToString::to_string).unwrap_or_default();
        assert!(message.contains(wanted), "{define}: {message}");
        assert!(message.contains(library.to_str().unwrap()), "{define}: the file is not named: {message}");
        let names = |registry: &Registry| -> Vec<_> {
            registry.routes().iter().map(|known| known.route.name().to_owned()).collect()
        };
        assert_eq!(names(&registry), names(&self::registry()), "{define}: nothing of it is registered");
        assert_eq!((registry.commands().len(), registry.encoders().len()), (0, 0), "{define}");
        let report = &registry.addons()[0];
        assert_eq!(report.error, errors.first().cloned(), "{define}");
        assert_eq!(report.sha256.as_ref().map(String::len), Some(64), "{define}");
    }
}

#[test]
fn files_that_are_no_add_ons_or_not_trusted_are_refused_and_the_others_are_loaded() {
    let Some(workshop) = Workshop::open("files_that_are_no_add_ons_or_not_trusted_are_refused") else { return };
    let good = workshop.make(&[]);
    let folder = good.parent().unwrap().to_owned();
    let text = folder.join("text.so");
    fs::write(&text, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&text, Permissions::from_mode(0o644)).unwrap();
    let open_to_all = workshop.make(&["NAME=NPUHAL_TEXT(\"other\")"]);
    fs::set_permissions(&open_to_all, Permissions::from_mode(0o777)).unwrap();
    let again = workshop.make(&["NAME=NPUHAL_TEXT(\"again\")"]);
    let missing = folder.join("missing.so");
    let mut registry = registry();
    let errors = registry.load_addons(&[missing, text, open_to_all, folder, good.clone(), again.clone()]);
    let messages: Vec<String> = errors.iter().map(ToString::to_string).collect();
    assert!(matches!(errors[0], AddonError::Unreadable { .. }), "{messages:?}");
    assert!(matches!(errors[1], AddonError::NotALibrary { .. }), "{messages:?}");
    assert!(matches!(errors[2], AddonError::Untrusted { what: "it", .. }), "{messages:?}");
    assert!(matches!(errors[3], AddonError::Unreadable { .. }), "{messages:?}");
    assert!(
        messages[4].contains("the route 'route' is registered twice: by loaded add-on")
            && messages[4].contains(again.to_str().unwrap())
            && messages[4].contains(good.to_str().unwrap()),
        "{messages:?}"
    );
    assert_eq!(messages.len(), 5);
    assert_eq!(registry.route("route").unwrap().package, "faulty");
    let loaded: Vec<bool> = registry.addons().iter().map(|report| report.error.is_none()).collect();
    assert_eq!(loaded, [false, false, false, false, true, false]);
    let report = &registry.addons()[4];
    assert_eq!((report.name.as_str(), report.version.as_str()), ("faulty", "1.0"));
    assert_eq!(report.options, [("key".to_owned(), "an option".to_owned())]);
    assert_eq!(registry.option_keys(), ["key"]);
}

#[test]
fn a_folder_that_others_can_write_to_is_not_trusted() {
    let Some(workshop) = Workshop::open("a_folder_that_others_can_write_to_is_not_trusted") else { return };
    let library = workshop.make(&[]);
    let folder = library.parent().unwrap();
    fs::set_permissions(folder, Permissions::from_mode(0o777)).unwrap();
    let errors = registry().load_addons(std::slice::from_ref(&library));
    assert!(matches!(errors[0], AddonError::Untrusted { what: "its folder", .. }), "{errors:?}");
    // Who can write further up can put another folder in the place of this one.
    let inner = folder.join("inner");
    fs::create_dir(&inner).unwrap();
    fs::set_permissions(&inner, Permissions::from_mode(0o700)).unwrap();
    let moved = inner.join("moved.so");
    fs::copy(&library, &moved).unwrap();
    let errors = registry().load_addons(&[moved]);
    fs::set_permissions(folder, Permissions::from_mode(0o700)).unwrap();
    assert!(matches!(errors[0], AddonError::Untrusted { what: "a folder above it", .. }), "{errors:?}");
    if std::os::unix::fs::chown(&library, Some(12345), None).is_err() {
        println!("skipped: a_folder_that_others_can_write_to_is_not_trusted: only root gives files away");
        return;
    }
    let message = registry().load_addons(&[library])[0].to_string();
    assert!(message.contains("since it belongs to user 12345, neither to you"), "{message}");
}

#[test]
fn faults_of_the_fitness_are_told_and_the_cpu_takes_over() {
    let Some(workshop) = Workshop::open("faults_of_the_fitness_are_told_and_the_cpu_takes_over") else { return };
    let model = workshop.model();
    let cases: &[(&str, &str)] = &[
        ("return NPUHAL_FITNESS_UNAVAILABLE", "route route is not available: it gave no reason"),
        ("tell(request->reason, \"no kernels\"); return NPUHAL_FITNESS_UNAVAILABLE", "is not available: no kernels"),
        ("tell(request->reason, \"a\\xff\\n\"); return NPUHAL_FITNESS_UNAVAILABLE", "is not available: a\u{fffd}"),
        (
            "npuhal_str bad = { NULL, 3 }; request->reason.write(request->reason.state, bad); return NPUHAL_FITNESS_UNAVAILABLE",
            "is not available: (it gave text at a null pointer)",
        ),
        ("return NPUHAL_FITNESS_FAILED", "it gave no reason"),
        ("return 77", "it answered 77; wanted 0 to 5"),
        ("service->device = 9", "device: there is no device 9; 1 were offered"),
        ("service->window = 0", "window: 0 positions; wanted at least 1"),
        ("service->speed = 9", "speed: 9; wanted 0 to 4"),
        ("service->claim = 9", "claim: 9; wanted 0 to 3"),
        ("service->tokens_per_second = NAN", "tokens_per_second: NaN; wanted a number from 0"),
        ("service->tokens_per_second = -1", "tokens_per_second: -1; wanted a number from 0"),
        ("service->placement_len = 65", "placement: 65 entries; at most 64 fit"),
        ("service->placement_len = 1", "placement: it ends at layer 0 of 2"),
        ("service->placement_len = 1; service->placement[0].start = 1", "placement: layers 1..0 after layer 0 of 2"),
        ("service->placement_len = 1; service->placement[0].end = 3", "placement: layers 0..3 after layer 0 of 2"),
        (
            "service->placement_len = 1; service->placement[0].end = 2; service->placement[0].device = 4",
            "placement: there is no device 4",
        ),
        (
            "service->placement_len = 1; service->placement[0].end = 2; service->placement[0].yields = 4",
            "placement: yields 4; wanted 0 to 2",
        ),
    ];
    for (code, wanted) in cases {
        let (registry, library) = workshop.load(&[&format!("IN_FITNESS={code}")]);
        let choice = select(&registry, &model, &Request::default()).unwrap();
        assert_eq!(choice.route.name(), "cpu", "{code}");
        let line = choice.decision.line();
        assert!(line.contains(wanted), "{code}: {line}");
        let is_fault = !code.contains("UNAVAILABLE");
        assert_eq!(line.contains(library.to_str().unwrap()), is_fault, "{code}: {line}");
    }
    let optional = "IN_ENTRY=routes[0].flags = NPUHAL_ROUTE_FLAGS_OPTIONAL";
    let (registry, _) = workshop.load(&[optional, "IN_FITNESS=return NPUHAL_FITNESS_UNAVAILABLE"]);
    let choice = select(&registry, &model, &Request::default()).unwrap();
    assert!(!choice.decision.line().contains("route"), "an optional route is silent: {}", choice.decision.line());
    let (registry, _) = workshop.load(&["IN_FITNESS=return NPUHAL_FITNESS_NOT_MINE"]);
    let choice = select(&registry, &model, &Request::default()).unwrap();
    assert!(matches!(choice.decision.routes[0].outcome, RouteOutcome::Declined(npuhal_registry::Decline::NotMine)));
    let (registry, _) =
        workshop.load(&["IN_FITNESS=tell(request->reason, \"it must\"); return NPUHAL_FITNESS_REQUIRED"]);
    let error = select(&registry, &model, &Request::default()).unwrap_err();
    assert_eq!(error.to_string(), "this model of type llama needs the route route: it must");
}

#[test]
fn faults_of_the_opening_are_errors_and_close_what_was_opened() {
    let Some(workshop) = Workshop::open("faults_of_the_opening_are_errors_and_close_what_was_opened") else { return };
    let model = workshop.model();
    let cases: &[(&str, &str)] = &[
        ("free(self); open_sessions--; return NPUHAL_STATUS_FAILED", "failed: it gave no reason"),
        ("free(self); open_sessions--; tell(request->error, \"no memory\"); return 9", "failed: no memory"),
        ("out->kind = 0", "kind: 0; wanted 1 (stepper) or 2 (generator)"),
        ("out->positions = 0", "positions: 0; wanted at least 1"),
        ("out->rows_per_call = 0", "rows_per_call: 0; wanted at least 1"),
        ("out->sequences = 0", "sequences: 0; wanted at least 1"),
        ("out->vocab_size = 5", "vocab_size: 5 logits a row; the model has 266 tokens"),
        ("out->stepper = NULL", "stepper: a null pointer"),
        ("stepper.size_bytes = 5", "stepper, size: it states a size of 5 bytes"),
        ("stepper.step = NULL", "stepper, step: a null pointer where a function is wanted"),
        ("stepper.truncate = NULL", "stepper, truncate: a null pointer where a function is wanted"),
        ("out->kind = 2; out->generator = NULL", "generator: a null pointer"),
        ("out->kind = 2; generator.generate = NULL", "generator, generate: a null pointer where a function is wanted"),
        ("out->kind = 2; out->opens_think = 2", "opens_think: 2; wanted 0 or 1"),
        ("out->kind = 2; out->default_repetition_penalty = NAN", "default_repetition_penalty: NaN"),
    ];
    for (code, wanted) in cases {
        let (registry, library) = workshop.load(&[&format!("IN_OPEN={code}")]);
        let message = open(&registry, &model).err().unwrap_or_default();
        assert!(message.contains(wanted) && message.contains(library.to_str().unwrap()), "{code}: {message}");
        assert_eq!(open_sessions(&registry), 0, "{code}: a session is still open");
    }
}

#[test]
fn a_stepper_is_called_in_parts_and_its_results_are_checked() {
    let Some(workshop) = Workshop::open("a_stepper_is_called_in_parts_and_its_results_are_checked") else { return };
    let model = workshop.model();
    let (registry, _) = workshop.load(&[]);
    let mut good = stepper(&registry, &model);
    let (mut logits, control) = (HiddenRows::new(), Control::new());
    good.begin().unwrap();
    good.step(&rows(10), Want::All, &mut logits, &control).unwrap();
    assert_eq!(logits.rows(), 10);
    for (index, row) in rows(10).iter().enumerate() {
        let best = logits.row(index).iter().position(|&logit| logit == 1.0);
        assert_eq!(best, Some(row.token as usize + 1), "row {index}");
    }
    good.step(
        &rows(10),
        Want::Each(&[false, true, false, false, false, true, false, false, false, false]),
        &mut logits,
        &control,
    )
    .unwrap();
    assert_eq!((logits.rows(), logits.row(1)[16]), (2, 1.0));
    assert_eq!(good.truncate(SequenceId(0), 4), 4);
    assert_eq!(good.truncate(SequenceId(0), 9), 4);
    for row in [
        Row { sequence: SequenceId(1), token: 0, position: 0 },
        Row { sequence: SequenceId(0), token: 266, position: 0 },
        Row { sequence: SequenceId(0), token: 0, position: 32 },
    ] {
        let error = good.step(&[row], Want::Last, &mut logits, &control).unwrap_err();
        assert!(matches!(error, RunError::Capacity { .. }), "{error}");
    }
    control.cancel();
    assert!(matches!(good.step(&rows(1), Want::Last, &mut logits, &control), Err(RunError::Cancelled)));
    good.end();
    drop(good);

    let cases: &[(&str, &str, bool)] = &[
        ("logits[7] = NAN", "logit of token 7 in row 0 of route 'route' of the add-on", false),
        ("logits[7] = INFINITY", "is not finite", false),
        ("return NPUHAL_STATUS_FAILED", "failed: it gave no reason", false),
        ("tell(error, \"no luck\"); return NPUHAL_STATUS_FAILED", "no luck", false),
        ("return NPUHAL_STATUS_CANCELLED", "it says that it was told to stop, but it was not", false),
        ("return 99", "it ended with status 99; wanted 0 to 5", false),
        (
            "tell(error, \"gone\"); return NPUHAL_STATUS_LOST",
            "the hardware context was lost (route 'route': gone)",
            false,
        ),
        ("tell(error, \"oh\"); return NPUHAL_STATUS_PANICKED", "it panicked: oh", true),
    ];
    for (code, wanted, breaks) in cases {
        let (registry, _) = workshop.load(&[&format!("IN_STEP={code}")]);
        let mut stepper = stepper(&registry, &model);
        let mut step = || stepper.step(&rows(1), Want::Last, &mut logits, &Control::new()).unwrap_err().to_string();
        let message = step();
        assert!(message.contains(wanted), "{code}: {message}");
        let again = step();
        assert_eq!(again.contains("the session is broken since a step panicked: oh"), *breaks, "{code}: {again}");
        drop(stepper);
        assert_eq!(open_sessions(&registry), 0, "{code}: a session is still open");
    }
    let left_out = workshop.load(&["IN_STEP=logits[logits_len - 1] = NAN"]).0;
    assert!(stepper(&left_out, &model).step(&rows(5), Want::All, &mut logits, &Control::new()).is_err());
    let (registry, _) = workshop.load(&["IN_TRUNCATE=return len + 1"]);
    let mut liar = stepper(&registry, &model);
    assert_eq!(liar.truncate(SequenceId(0), 4), 0);
    let error = liar.step(&rows(1), Want::Last, &mut logits, &Control::new()).unwrap_err().to_string();
    assert!(error.contains("it kept 5 positions where 4 were to remain"), "{error}");
    drop(liar);
    assert_eq!(open_sessions(&registry), 0, "a session that broke is closed");
}

#[test]
fn names_of_tensors_are_valid_until_the_session_is_closed() {
    let Some(workshop) = Workshop::open("names_of_tensors_are_valid_until_the_session_is_closed") else { return };
    let (registry, _) = workshop.load(&[
        "IN_OPEN=if (the_host->tensor(request->model->handle, NPUHAL_ROLE_TOKEN_EMBEDDING, 0, &lent)) \
            return NPUHAL_STATUS_FAILED",
        "IN_STEP=for (size_t i = 0; i < lent.name.len; i++) logits[i] = lent.name.data[i]",
    ]);
    let model = workshop.model();
    let mut stepper = stepper(&registry, &model);
    let name = model.require(npuhal_models::TensorRole::TokenEmbedding).unwrap().name().to_owned();
    drop(model);
    // Whatever was freed is used anew.
    let others: Vec<std::sync::Arc<str>> = (0..10_000).map(|_| "?".repeat(name.len()).into()).collect();
    let mut logits = HiddenRows::new();
    stepper.step(&rows(1), Want::Last, &mut logits, &Control::new()).unwrap();
    let read: String = logits.row(0)[..name.len()].iter().map(|&byte| char::from(byte as u8)).collect();
    assert_eq!(read, name);
    drop(others);
}

#[test]
fn a_session_is_broken_where_both_sides_panicked() {
    let Some(workshop) = Workshop::open("a_session_is_broken_where_both_sides_panicked") else { return };
    let code = "request->on_token(request->on_token_state, 1); return NPUHAL_STATUS_PANICKED";
    let (registry, _) = workshop.load(&["KIND=2", &format!("IN_GENERATE={code}")]);
    let Session::Generator(mut generator) = open(&registry, &workshop.model()).unwrap() else {
        panic!("wanted a generator")
    };
    let request = GeneratorRequest { prompt: &[1], max_tokens: 6, repetition_penalty: 1.0, penalty_window: 64 };
    let mut on_token = |_: u32| -> bool { panic!("the receiver of tokens") };
    let both = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        generator.generate(&request, &mut on_token, &Control::new())
    }));
    assert!(both.is_err());
    let error = generator.generate(&request, &mut |_| true, &Control::new()).unwrap_err().to_string();
    assert!(error.contains("the session is broken since a generation panicked"), "{error}");
}

#[test]
fn a_generator_is_checked_token_by_token() {
    let Some(workshop) = Workshop::open("a_generator_is_checked_token_by_token") else { return };
    let model = workshop.model();
    let generate = |code: &str, stop_at: usize| {
        let (registry, library) = workshop.load(&["KIND=2", &format!("IN_GENERATE={code}")]);
        let Session::Generator(mut generator) = open(&registry, &model).unwrap() else { panic!("wanted a generator") };
        assert_eq!((generator.max_context(), generator.default_repetition_penalty()), (32, 1.0));
        assert_eq!(generator.describe(), "a test generator");
        let mut seen = Vec::new();
        let request =
            GeneratorRequest { prompt: &[1, 2, 3], max_tokens: 6, repetition_penalty: 1.0, penalty_window: 64 };
        let mut on_token = |token| {
            seen.push(token);
            seen.len() < stop_at
        };
        let outcome = generator.generate(&request, &mut on_token, &Control::new());
        (outcome.map_err(|error| error.to_string()), seen, library)
    };
    let (outcome, seen, _) = generate("", 100);
    let outcome = outcome.unwrap();
    assert_eq!(
        (outcome.tokens.as_slice(), seen.as_slice()),
        ([0, 1, 2, 3, 4, 5].as_slice(), outcome.tokens.as_slice())
    );
    assert_eq!((outcome.prefill_ms, outcome.decode_ms, outcome.reused), (1.5, 0.0, 0));
    let (outcome, seen, _) = generate("", 2);
    assert_eq!((outcome.unwrap().tokens.len(), seen.len()), (2, 2), "told to stop");

    let give = |token: &str| format!("request->on_token(request->on_token_state, {token})");
    let cases: &[(&str, &str)] = &[
        (&give("266"), "it gave the token 266; the model has 266"),
        (&give("0xffffffff"), "it gave the token 4294967295"),
        (&format!("for (int i = 0; i < 9; i++) {}", give("1")), "it gave more than 6 tokens"),
        ("outcome->prefill_ms = NAN", "prefill_ms is NaN; wanted a number from 0"),
        ("outcome->decode_ms = -2", "decode_ms is -2; wanted a number from 0"),
        ("outcome->reused = 4", "it reused 4 positions of a prompt of 3"),
        ("outcome->stopped_at_eos = 2", "stopped_at_eos: 2; wanted 0 or 1"),
        ("tell(request->error, \"no luck\"); return NPUHAL_STATUS_FAILED", "no luck"),
        ("return -4", "it ended with status -4"),
    ];
    for (code, wanted) in cases {
        let (outcome, seen, library) = generate(code, 100);
        let message = outcome.unwrap_err();
        assert!(message.contains(wanted) && message.contains(library.to_str().unwrap()), "{code}: {message}");
        assert!(seen.iter().all(|&token| token < 266), "{code}: {seen:?}");
    }
}

#[test]
fn commands_and_encoders_are_checked() {
    let Some(workshop) = Workshop::open("commands_and_encoders_are_checked") else { return };
    let run = |code: &str| {
        let (registry, _) = workshop.load(&[&format!("IN_RUN={code}")]);
        let mut output = Vec::new();
        let result = registry.command("command").unwrap().command.run(&["a".to_owned()], &mut output);
        (result.map_err(|error| error.to_string()), String::from_utf8(output).unwrap())
    };
    assert_eq!(run("*code = 7"), (Ok(7), "ran".to_owned()));
    for (code, wanted) in [
        ("*code = 256", "exit code 256; wanted 0 to 255"),
        ("*code = -1", "exit code -1; wanted 0 to 255"),
        ("tell(error, \"no luck\"); return NPUHAL_STATUS_FAILED", "no luck"),
        ("npuhal_str bad = { NULL, 3 }; output.write(output.state, bad)", "the add-on gave text at a null pointer"),
    ] {
        let message = run(code).0.unwrap_err();
        assert!(message.contains(wanted), "{code}: {message}");
    }
    let encode = |code: &str| {
        let (registry, _) = workshop.load(&[&format!("IN_ENCODE={code}")]);
        registry.encoder("encoder").unwrap().encoder.encode("four").map_err(|error| error.to_string())
    };
    assert_eq!(encode(""), Ok(vec![4.0; 3]));
    for (code, wanted) in [
        ("vector[1] = NAN", "element 1 of 3 is NaN; wanted finite numbers"),
        ("vector[2] = -INFINITY", "element 2 of 3 is -inf"),
        ("tell(error, \"no luck\"); return NPUHAL_STATUS_FAILED", "no luck"),
    ] {
        let message = encode(code).unwrap_err();
        assert!(message.contains(wanted), "{code}: {message}");
    }
}

#[test]
fn an_option_reaches_only_the_add_on_that_declared_it() {
    let Some(workshop) = Workshop::open("an_option_reaches_only_the_add_on_that_declared_it") else { return };
    let model = workshop.model();
    // Both say what they were given.
    let show = "IN_FITNESS=for (size_t i = 0; i < request->options->pairs_len; i++) \
                request->detail.write(request->detail.state, request->options->pairs[i].value)";
    let one = workshop.make(&[show, "OPTION_KEY=NPUHAL_TEXT(\"one\")"]);
    let other_names = ["ROUTE_NAME=NPUHAL_TEXT(\"other\")", "COMMAND_NAME=NPUHAL_TEXT(\"other\")"];
    let two = workshop.make(&[
        show,
        other_names[0],
        other_names[1],
        "IN_ENTRY=table.encoders_len = 0",
        "OPTION_KEY=NPUHAL_TEXT(\"two\")",
    ]);
    let mut registry = registry();
    assert_eq!(registry.load_addons(&[one, two]), []);
    let mut request = Request::default();
    let keys = registry.option_keys();
    request.options.set_route_pair("one=FIRST", &keys).unwrap();
    request.options.set_route_pair("two=SECOND", &keys).unwrap();
    let error = request.options.set_route_pair("three=3", &keys).unwrap_err();
    assert_eq!(error.to_string(), "unknown option 'three'; known options: one, two");
    let decision = select(&registry, &model, &request).unwrap().decision;
    let details: Vec<_> = decision
        .routes
        .iter()
        .filter_map(|report| match &report.outcome {
            RouteOutcome::Serves(service) if report.name != "cpu" => {
                Some((report.name.as_str(), service.detail.as_str()))
            }
            _ => None,
        })
        .collect();
    assert_eq!(details, [("other", "a testSECOND"), ("route", "a testFIRST")]);
}
