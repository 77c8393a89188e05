//! Selection over fake routes and devices.

mod matrix;

use crate::factory::{DeviceFactory, Unavailable};
use crate::options::{Options, Prefer};
use crate::registry::{Origin, Registry, RegistryError, RegistryHost};
use crate::route::{
    Decline, ExpectedSpeed, Fitness, Host, OpenRequest, Reason, Route, RouteError, SegmentRequest, Service, SpeedClass,
};
use crate::selection::{Choice, DeviceCheck, Request, RouteOutcome, SelectionError, SelectionProblem, select};
use crate::span::SegmentSpan;
use crate::uri::{DeviceChoice, DeviceUri};
use npuhal_core::card::{Claim, DeviceCard, Generation};
use npuhal_core::device::Device;
use npuhal_core::error::DeviceError;
use npuhal_core::stage::Session;
use npuhal_models::config::{DecoderFeatures, Rope, RopePairing, RopeScaling};
use npuhal_models::source::Format;
use npuhal_models::vocabulary::Vocabulary;
use npuhal_models::{ModelConfig, ModelSource};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) fn config(model_type: &str, layers: usize) -> ModelConfig {
    ModelConfig {
        model_type: model_type.to_owned(),
        name: String::new(),
        hidden_size: 8,
        layers,
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        intermediate_size: 16,
        vocab_size: 32,
        context_length: 128,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 1e4, dims: 4, pairing: RopePairing::Halves, scaling: RopeScaling::None },
        qkv_bias: false,
        qk_norm: false,
        tied_head: true,
        features: DecoderFeatures::default(),
    }
}

pub(crate) fn model(model_type: &str) -> ModelSource {
    let path = PathBuf::from("model.gguf");
    ModelSource::new(path, Format::Gguf, config(model_type, 4), Vocabulary::default(), BTreeMap::new())
}

fn card(id: &str, generation: Generation) -> DeviceCard {
    DeviceCard {
        id: id.to_owned(),
        name: id.to_owned(),
        generation,
        is_virtual: id.starts_with("virtual:"),
        columns: 1,
        core_rows: 1,
        memory_bytes: None,
        driver: None,
        context_limit: None,
        features: Vec::new(),
    }
}

/// A factory whose devices are given, some of them failing their check.
struct FakeFactory {
    name: &'static str,
    generation: Generation,
    cards: Vec<DeviceCard>,
    broken: Vec<&'static str>,
}

impl DeviceFactory for FakeFactory {
    fn name(&self) -> &str {
        self.name
    }

    fn generations(&self) -> &[Generation] {
        std::slice::from_ref(&self.generation)
    }

    fn looks_for_hardware(&self) -> bool {
        self.name != "virtual"
    }

    fn enumerate(&self) -> Vec<DeviceCard> {
        self.cards.clone()
    }

    fn absence(&self) -> String {
        "no /dev/accel/accel* node".to_owned()
    }

    fn check(&self, card: &DeviceCard) -> Result<(), Unavailable> {
        if self.broken.contains(&card.id.as_str()) {
            return Err(Unavailable {
                reason: "the node is not readable".to_owned(),
                remedy: "add yourself to the group render".to_owned(),
            });
        }
        Ok(())
    }

    fn open(&self, uri: &DeviceUri) -> Result<Box<dyn Device>, DeviceError> {
        Err(DeviceError::Unsupported { device: uri.id(), feature: "opening".to_owned(), remedy: String::new() })
    }
}

/// A route that serves on the first device of its list that it is shown, or declines.
struct FakeRoute {
    name: &'static str,
    types: &'static [&'static str],
    devices: &'static [&'static str],
    window: u32,
    speed: SpeedClass,
    tokens_per_second: Option<f64>,
    decline: Option<Decline>,
}

impl Route for FakeRoute {
    fn name(&self) -> &str {
        self.name
    }

    fn model_types(&self) -> &[&str] {
        self.types
    }

    fn fitness(&self, _: &ModelSource, devices: &[DeviceCard], _: &Options) -> Fitness {
        if let Some(decline) = &self.decline {
            return Fitness::Declines(decline.clone());
        }
        let found = self.devices.iter().find(|id| devices.iter().any(|card| card.id == **id));
        match found {
            None => Fitness::Declines(Decline::Optional(Reason::new("no device of mine"))),
            Some(id) => Fitness::Serves(Service {
                device: (*id).to_owned(),
                window: self.window,
                placement: Vec::new(),
                speed: self.speed,
                expected: self
                    .tokens_per_second
                    .map(|tokens_per_second| ExpectedSpeed { tokens_per_second, claim: Claim::Modelled }),
                memory_bytes: None,
                kernels: Vec::new(),
                detail: if *id == "cpu" { "AVX2, 2 threads, numerics fast".to_owned() } else { String::new() },
            }),
        }
    }

    fn open(&self, _: OpenRequest<'_>) -> Result<Session, RouteError> {
        Err(RouteError::Declined { route: self.name.to_owned(), reason: Reason::new("a fake") })
    }
}

fn cpu() -> FakeRoute {
    FakeRoute {
        name: "cpu",
        types: &["llama", "qwen3"],
        devices: &["cpu"],
        window: 8192,
        speed: SpeedClass::Cpu,
        tokens_per_second: None,
        decline: None,
    }
}

fn engine() -> FakeRoute {
    FakeRoute {
        name: "xdna1-engine",
        types: &["llama"],
        devices: &["npu1", "virtual:npu1"],
        window: 64,
        speed: SpeedClass::Engine,
        tokens_per_second: None,
        decline: None,
    }
}

fn lane() -> FakeRoute {
    FakeRoute {
        name: "xdna2-lane",
        types: &["qwen3", "llama"],
        devices: &["npu5", "virtual:npu5"],
        window: 2048,
        speed: SpeedClass::Lane,
        tokens_per_second: None,
        decline: None,
    }
}

fn private(name: &'static str, decline: Option<Decline>) -> FakeRoute {
    FakeRoute {
        name,
        types: &["llama"],
        devices: &["cpu"],
        window: 512,
        speed: SpeedClass::Reference,
        tokens_per_second: None,
        decline,
    }
}

/// A machine with the given NPUs, a CPU and two virtual NPUs.
fn factories(registry: &mut Registry, npus: &[&str], broken: &[&'static str]) {
    let generation = |id: &str| if id.ends_with("npu1") { Generation::Xdna1 } else { Generation::Xdna2 };
    let mut add = |name, kind, ids: &[&str]| {
        let cards =
            ids.iter().map(|id| card(id, if *id == "cpu" { Generation::Cpu } else { generation(id) })).collect();
        let factory = FakeFactory { name, generation: kind, cards, broken: broken.to_vec() };
        registry.add_factory(Arc::new(factory), Origin::BuiltIn, "npuhal-test").unwrap();
    };
    add("amdxdna", Generation::Xdna2, npus);
    add("cpu", Generation::Cpu, &["cpu"]);
    add("virtual", Generation::Xdna1, &["virtual:npu1", "virtual:npu5"]);
}

fn machine(npus: &[&str], broken: &[&'static str]) -> Registry {
    let mut registry = Registry::new();
    factories(&mut registry, npus, broken);
    for route in [cpu(), engine(), lane()] {
        registry.add_route(Arc::new(route), Origin::BuiltIn, "npuhal-test").unwrap();
    }
    registry
}

fn linked(package: &str) -> Origin {
    Origin::LinkedAddOn { package: package.to_owned() }
}

fn loaded(order: usize) -> Origin {
    Origin::LoadedAddOn { order, file: PathBuf::from(format!("/addons/{order}.so")) }
}

fn ask(
    registry: &Registry,
    model_type: &str,
    device: &str,
    prefer: Option<Prefer>,
    needed_positions: u32,
) -> Result<Choice, SelectionError> {
    let device: DeviceChoice = device.parse().unwrap();
    let request = Request { device, prefer, needed_positions, ..Request::default() };
    select(registry, &model(model_type), &request)
}

fn winner(registry: &Registry, model_type: &str, device: &str, prefer: Option<Prefer>, needed: u32) -> String {
    match ask(registry, model_type, device, prefer, needed) {
        Ok(choice) => format!("{} on {}", choice.route.name(), choice.service.device),
        Err(error) => match error.problem {
            SelectionProblem::NoSuchDevice { .. } => "no such device".to_owned(),
            SelectionProblem::DeviceUnavailable { .. } => "device unavailable".to_owned(),
            SelectionProblem::DeviceCannotServe { .. } => "device cannot serve".to_owned(),
            SelectionProblem::RouteRequired { .. } => "route required".to_owned(),
            SelectionProblem::WindowTooSmall { .. } => "window too small".to_owned(),
            SelectionProblem::NoRoute { .. } => "no route".to_owned(),
        },
    }
}

#[test]
fn the_selection_matrix() {
    const CPU: &str = "cpu on cpu";
    const ENGINE: &str = "xdna1-engine on npu1";
    const LANE: &str = "xdna2-lane on npu5";
    const GONE: &str = "no such device";
    // Machine; pin; winner for llama with 32 positions, for llama with 1000, for qwen3 with 32.
    let table: &[(&[&str], &str, [&str; 3])] = &[
        (&[], "auto", [CPU, CPU, CPU]),
        (&[], "cpu", [CPU, CPU, CPU]),
        (&[], "npu1", [GONE, GONE, GONE]),
        (&["npu1"], "auto", [ENGINE, CPU, CPU]),
        (&["npu1"], "npu1", [ENGINE, ENGINE, "device cannot serve"]),
        (&["npu1"], "cpu", [CPU, CPU, CPU]),
        (&["npu1"], "npu5", [GONE, GONE, GONE]),
        (&["npu5"], "auto", [LANE, LANE, LANE]),
        (&["npu5"], "cpu", [CPU, CPU, CPU]),
        (&["npu1", "npu5"], "auto", [LANE, LANE, LANE]),
        (&["npu1", "npu5"], "npu1", [ENGINE, ENGINE, "device cannot serve"]),
        (&["npu1", "npu5"], "npu5", [LANE, LANE, LANE]),
        (&[], "virtual:npu1", ["xdna1-engine on virtual:npu1", "xdna1-engine on virtual:npu1", "device cannot serve"]),
        (
            &[],
            "virtual:npu5",
            ["xdna2-lane on virtual:npu5", "xdna2-lane on virtual:npu5", "xdna2-lane on virtual:npu5"],
        ),
    ];
    for (npus, pin, expected) in table {
        let registry = machine(npus, &[]);
        let found = [("llama", 32), ("llama", 1000), ("qwen3", 32)]
            .map(|(model_type, needed)| winner(&registry, model_type, pin, None, needed));
        assert_eq!(found, *expected, "machine {npus:?}, pin {pin}");
    }
}

#[test]
fn a_preference_shifts_the_choice_and_prints_what_it_costs() {
    let registry = machine(&["npu1"], &[]);
    let npu = ask(&registry, "llama", "auto", Some(Prefer::Npu), 1000).unwrap();
    assert_eq!(npu.route.name(), "xdna1-engine");
    assert!(
        npu.decision.trade_offs[0].contains("64 positions is smaller than the 1000"),
        "{:?}",
        npu.decision.trade_offs
    );
    assert!(npu.decision.trade_offs[1].contains("8192 positions instead of 64"), "{:?}", npu.decision.trade_offs);
    let context = ask(&registry, "llama", "auto", Some(Prefer::Context), 16).unwrap();
    assert_eq!(context.route.name(), "cpu");
    assert_eq!(context.decision.trade_offs, ["route xdna1-engine on npu1 would be faster"]);
    assert_eq!(winner(&registry, "llama", "auto", Some(Prefer::Speed), 16), "xdna1-engine on npu1");
    assert_eq!(
        winner(&registry, "llama", "auto", Some(Prefer::Speed), 1000),
        "cpu on cpu",
        "speed still needs the window"
    );
}

#[test]
fn auto_does_not_choose_a_window_that_cannot_hold_the_request() {
    let registry = machine(&["npu1"], &[]);
    assert_eq!(winner(&registry, "llama", "auto", None, 64), "xdna1-engine on npu1");
    let choice = ask(&registry, "llama", "auto", None, 65).unwrap();
    assert_eq!(choice.route.name(), "cpu");
    assert!(choice.decision.trade_offs[0].contains("--prefer npu takes it anyway"), "{:?}", choice.decision.trade_offs);
    let error = ask(&registry, "llama", "auto", None, 9000).unwrap_err();
    assert_eq!(error.problem, SelectionProblem::WindowTooSmall { needed: 9000, window: 8192, route: "cpu".to_owned() });
}

#[test]
fn a_device_that_fails_its_check_is_told_and_never_pinned_silently() {
    let registry = machine(&["npu5"], &["npu5"]);
    let choice = ask(&registry, "llama", "auto", None, 32).unwrap();
    assert_eq!(choice.route.name(), "cpu");
    assert_eq!(
        choice.decision.line(),
        "npu5 cannot be used: the node is not readable; add yourself to the group render; \
         using the CPU (AVX2, 2 threads, numerics fast)"
    );
    let error = ask(&registry, "llama", "npu5", None, 32).unwrap_err();
    assert_eq!(
        error.to_string(),
        "device npu5 cannot be used: the node is not readable; add yourself to the group render"
    );
    assert!(error.decision.routes.is_empty(), "no route was asked");
}

#[test]
fn the_line_says_no_npu_found_only_where_somebody_looked() {
    let registry = machine(&[], &[]);
    let choice = ask(&registry, "llama", "auto", None, 0).unwrap();
    assert_eq!(
        choice.decision.line(),
        "no NPU found (no /dev/accel/accel* node); using the CPU (AVX2, 2 threads, numerics fast)"
    );
    let pinned = ask(&registry, "llama", "cpu", None, 0).unwrap();
    assert_eq!(pinned.decision.line(), "using the CPU (AVX2, 2 threads, numerics fast)");

    // Without a driver backend; the factory of virtual NPUs has not looked at the machine.
    let mut without = Registry::new();
    for (name, generation, id) in [("cpu", Generation::Cpu, "cpu"), ("virtual", Generation::Xdna1, "virtual:npu1")] {
        let factory = FakeFactory { name, generation, cards: vec![card(id, generation)], broken: Vec::new() };
        without.add_factory(Arc::new(factory), Origin::BuiltIn, "npuhal-test").unwrap();
    }
    without.add_route(Arc::new(cpu()), Origin::BuiltIn, "npuhal-test").unwrap();
    let line = ask(&without, "llama", "auto", None, 0).unwrap().decision.line();
    assert!(line.starts_with("this build has no NPU backend; using the CPU"), "{line}");
    let error = ask(&without, "llama", "virtual:npu1", None, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "device virtual:npu1 cannot run this model of type llama: no route of this build runs it there; route cpu runs it on cpu"
    );
    let error = ask(&without, "llama", "npu5", None, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no device 'npu5' (this build has no NPU backend); found: cpu, virtual:npu1"
    );
    let error = ask(&registry, "llama", "npu5", None, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no device 'npu5' (no /dev/accel/accel* node); found: cpu, virtual:npu1, virtual:npu5"
    );
}

#[test]
fn each_kind_of_decline_has_its_consequence() {
    let registry = |decline| {
        let mut registry = machine(&[], &[]);
        registry.add_route(Arc::new(private("private", Some(decline))), linked("closed"), "closed").unwrap();
        registry
    };
    let reason = || Reason::new("the kernel set is missing");
    for silent in [Decline::NotMine, Decline::Optional(reason())] {
        let choice = ask(&registry(silent), "llama", "auto", None, 0).unwrap();
        assert_eq!(choice.route.name(), "cpu");
        assert!(!choice.decision.line().contains("private"), "{}", choice.decision.line());
    }
    let choice = ask(&registry(Decline::Unavailable(reason())), "llama", "auto", None, 0).unwrap();
    assert_eq!(choice.route.name(), "cpu");
    assert!(choice.decision.line().contains("route private is not available: the kernel set is missing"));
    let error = ask(&registry(Decline::Required(reason())), "llama", "auto", None, 0).unwrap_err();
    assert_eq!(error.to_string(), "this model of type llama needs the route private: the kernel set is missing");
    assert_eq!(winner(&registry(Decline::Required(reason())), "qwen3", "auto", None, 0), "cpu on cpu", "another model");

    let mut outranked = registry(Decline::Required(reason()));
    outranked.add_route(Arc::new(private("newer", None)), loaded(0), "newer").unwrap();
    assert_eq!(winner(&outranked, "llama", "auto", None, 0), "newer on cpu");
}

#[test]
fn the_origin_decides_before_the_speed() {
    let mut registry = machine(&["npu5"], &[]);
    registry.add_route(Arc::new(private("b-linked", None)), linked("one"), "one").unwrap();
    assert_eq!(winner(&registry, "llama", "auto", None, 0), "b-linked on cpu");
    registry.add_route(Arc::new(private("a-linked", None)), linked("two"), "two").unwrap();
    assert_eq!(winner(&registry, "llama", "auto", None, 0), "a-linked on cpu", "the name decides, not the link order");
    registry.add_route(Arc::new(private("z-loaded", None)), loaded(0), "z").unwrap();
    assert_eq!(winner(&registry, "llama", "auto", None, 0), "z-loaded on cpu");
    registry.add_route(Arc::new(private("zz-loaded", None)), loaded(1), "zz").unwrap();
    assert_eq!(winner(&registry, "llama", "auto", None, 0), "zz-loaded on cpu", "the later file");
}

#[test]
fn a_later_origin_shadows_a_name_and_one_level_holds_it_once() {
    let mut registry = machine(&[], &[]);
    let mut other = cpu();
    other.window = 99;
    registry.add_route(Arc::new(other), linked("closed"), "closed").unwrap();
    let choice = ask(&registry, "llama", "auto", None, 0).unwrap();
    assert_eq!(choice.service.window, 99);
    let outcomes: Vec<_> = choice.decision.routes.iter().filter(|report| report.name == "cpu").collect();
    assert!(matches!(outcomes[1].outcome, RouteOutcome::Shadowed { .. }));

    let error = registry.add_route(Arc::new(cpu()), linked("another"), "another").unwrap_err();
    assert_eq!(
        error.to_string(),
        "the route 'cpu' is registered twice: by linked add-on another and by linked add-on closed; remove or rename one"
    );
    registry.add_route(Arc::new(private("p", None)), loaded(0), "0").unwrap();
    let error = registry.add_route(Arc::new(private("p", None)), loaded(1), "1").unwrap_err();
    let RegistryError::Duplicate { first, second, .. } = error else { panic!("{error}") };
    assert_eq!((first.as_str(), second.as_str()), ("loaded add-on /addons/0.so", "loaded add-on /addons/1.so"));
    let factory = FakeFactory { name: "cpu", generation: Generation::Cpu, cards: Vec::new(), broken: Vec::new() };
    let error = registry.add_factory(Arc::new(factory), Origin::BuiltIn, "twin").unwrap_err();
    assert!(error.to_string().contains("device factory 'cpu'"), "{error}");
}

#[test]
fn unknown_models_name_the_types_there_are() {
    let error = ask(&machine(&[], &[]), "mamba", "auto", None, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no route runs this model of type 'mamba' here; types that routes name: llama, qwen3"
    );
    let error = ask(&machine(&["npu1"], &[]), "qwen3", "npu1", None, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "device npu1 cannot run this model of type qwen3: route cpu runs it on cpu; route xdna2-lane: no device of mine"
    );
}

#[test]
fn an_npu_that_no_route_uses_is_told() {
    let choice = ask(&machine(&["npu1"], &[]), "qwen3", "auto", None, 0).unwrap();
    assert_eq!(
        choice.decision.line(),
        "npu1 was found, but no route of this build runs models of type qwen3 on it; \
         using the CPU (AVX2, 2 threads, numerics fast)"
    );
}

#[test]
fn virtual_devices_are_never_chosen_by_auto() {
    let choice = ask(&machine(&[], &[]), "llama", "auto", None, 0).unwrap();
    let virtuals = choice.decision.devices.iter().filter(|report| report.card.is_virtual);
    assert!(virtuals.clone().count() == 2 && virtuals.clone().all(|report| report.check == DeviceCheck::NotAsked));
}

#[test]
fn submitted_entries_are_collected_with_the_host_s_origin() {
    struct Submitted;
    impl Route for Submitted {
        fn name(&self) -> &str {
            "submitted"
        }
        fn model_types(&self) -> &[&str] {
            &["llama"]
        }
        fn fitness(&self, _: &ModelSource, _: &[DeviceCard], _: &Options) -> Fitness {
            Fitness::Declines(Decline::NotMine)
        }
        fn open(&self, _: OpenRequest<'_>) -> Result<Session, RouteError> {
            Err(RouteError::Declined { route: "submitted".to_owned(), reason: Reason::new("a fake") })
        }
    }
    crate::register_route!(Submitted);
    let origin = |built_in: &[&str]| Registry::collect(built_in).unwrap().route("submitted").unwrap().origin.clone();
    assert_eq!(origin(&["npuhal-registry"]), Origin::BuiltIn);
    assert_eq!(origin(&[]), Origin::LinkedAddOn { package: "npuhal-registry".to_owned() });
}

#[test]
fn the_host_opens_devices_and_segments_by_name() {
    let registry = machine(&["npu1"], &[]);
    let uri: DeviceUri = "npu1?fault=timeout".parse().unwrap();
    let host = RegistryHost::new(&registry, Some(&uri));
    assert_eq!(host.pinned(), Some(&uri));
    let error = |result: Result<Box<dyn Device>, RouteError>| result.err().map(|error| error.to_string());
    assert_eq!(error(host.open_device("npu1")).unwrap(), "npu1 does not support opening", "it reached the factory");
    assert_eq!(
        error(host.open_device("npu6")).unwrap(),
        "there is no device 'npu6'; found: npu1, cpu, virtual:npu1, virtual:npu5"
    );
    let (model, options) = (model("llama"), Options::default());
    let segment = |route: &str| {
        let span = SegmentSpan::whole(model.config());
        let request = SegmentRequest { model: &model, span, options: &options, positions: None };
        host.open_segment(route, request).err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert_eq!(segment("cpu"), "route cpu runs whole models only; asked for layers 0..4");
    assert_eq!(segment("gpu"), "there is no route 'gpu'; known routes: cpu, xdna1-engine, xdna2-lane");
}

#[test]
fn speed_goes_by_figures_only_where_all_have_one() {
    let machine = |cpu_speed: Option<f64>| {
        let mut registry = Registry::new();
        factories(&mut registry, &["npu1"], &[]);
        let cpu = FakeRoute { tokens_per_second: cpu_speed, ..cpu() };
        let engine = FakeRoute { tokens_per_second: Some(100.0), ..engine() };
        for route in [cpu, engine] {
            registry.add_route(Arc::new(route), Origin::BuiltIn, "npuhal-test").unwrap();
        }
        registry
    };
    assert_eq!(winner(&machine(Some(300.0)), "llama", "auto", Some(Prefer::Speed), 16), "cpu on cpu");
    assert_eq!(winner(&machine(Some(30.0)), "llama", "auto", Some(Prefer::Speed), 16), "xdna1-engine on npu1");
    assert_eq!(winner(&machine(None), "llama", "auto", Some(Prefer::Speed), 16), "xdna1-engine on npu1");
}

#[test]
fn a_model_that_was_not_read_is_for_add_ons_that_name_its_type() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), r#"{"model_type": "qwen3_5_moe"}"#).unwrap();
    let route = |name, types| FakeRoute { types, ..private(name, None) };
    let with = |routes: Vec<(FakeRoute, Origin)>| {
        let mut registry = machine(&["npu5"], &[]);
        let any = FakeRoute { types: &["*"], ..private("any", None) };
        registry.add_route(Arc::new(any), Origin::BuiltIn, "npuhal-test").unwrap();
        for (route, origin) in routes {
            registry.add_route(Arc::new(route), origin, "closed").unwrap();
        }
        registry
    };
    let closed = || (route("closed", &["qwen3_5_moe"]), linked("closed"));
    let all_types = || (route("all", &["*"]), linked("all"));
    let built_in = || (route("named", &["qwen3_5_moe"]), Origin::BuiltIn);
    let open = |registry: &Registry| crate::private::open_for_addons(registry, folder.path());
    assert!(open(&with(vec![])).is_none(), "nobody names the type");
    assert!(
        open(&with(vec![all_types(), built_in()])).is_none(),
        "a route of the program, or one for all types, is not meant"
    );
    let registry = with(vec![closed(), all_types(), built_in()]);
    let model = open(&registry).unwrap();
    assert_eq!((model.format(), model.config().layers), (Format::Unread, 0));
    let choice = select(&registry, &model, &Request::default()).unwrap();
    assert_eq!(choice.route.name(), "closed");
    let asked = |name: &str| {
        let report = choice.decision.routes.iter().find(|report| report.name == name).unwrap();
        report.outcome != RouteOutcome::OtherModel
    };
    assert_eq!(["closed", "all", "any", "named", "cpu"].map(asked), [true, false, false, false, false]);
    for (pin, wanted) in [("cpu", Some("closed")), ("npu5", None), ("virtual:npu5", None)] {
        let request = Request { device: pin.parse().unwrap(), ..Request::default() };
        let found = select(&registry, &model, &request).ok().map(|choice| choice.route.name().to_owned());
        assert_eq!(found.as_deref(), wanted, "{pin}");
    }
    for prefer in [Prefer::Npu, Prefer::Speed, Prefer::Context] {
        let request = Request { prefer: Some(prefer), ..Request::default() };
        assert_eq!(select(&registry, &model, &request).unwrap().route.name(), "closed", "{prefer}");
    }
}

#[test]
fn a_split_route_says_what_it_lacks() {
    let registry = machine(&["npu1"], &[]);
    let message = |text: &str| {
        let target = crate::Target::parse(text, &Options::default(), &[]).unwrap();
        match target.choose(&registry, &model("llama")) {
            Err(error) => error.to_string(),
            Ok(choice) => choice
                .open(&registry, &model("llama"), &Options::default())
                .err()
                .map_or_else(|| "opened".to_owned(), |error| error.to_string()),
        }
    };
    assert_eq!(message("0..2@npu1,2..@cpu"), "route xdna1-engine runs whole models only; asked for layers 0..2");
    assert!(message("0..2@npu5,2..@cpu").contains("there is no device 'npu5'"), "{}", message("0..2@npu5,2..@cpu"));
    assert!(message("0..2@npu1").contains("the parts end at layer 2 of 4"), "{}", message("0..2@npu1"));
    let target = crate::Target::parse("0..2@npu1,2..@cpu", &Options::default(), &[]).unwrap();
    let service = target.choose(&registry, &model("llama")).unwrap().service;
    assert_eq!((service.device.as_str(), service.window, service.speed), ("npu1", 64, SpeedClass::Hybrid));
    assert_eq!(service.placement.iter().map(|part| part.layers.clone()).collect::<Vec<_>>(), [0..2, 2..4]);
}

#[test]
fn a_witness_counts_what_devices_complete_and_changes_nothing() {
    use crate::witness::Witness;
    let registry = machine(&["npu1"], &[]);
    let witness = Witness::new();
    let host = RegistryHost::new(&registry, None).watched_by(&witness);
    assert!(host.open_device("npu1").is_err());
    assert!(witness.testimonies().is_empty(), "a device that does not open is not seen");
}
