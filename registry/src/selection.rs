//! The choice of a route and a device, and the record of how it was made.
//!
//! Order of the choice: usable devices are those that were found and passed their check (a virtual device only when pinned);
//! routes whose model types match say how they would run the model on them; of those that can hold the request the one of
//! the latest origin wins, then the highest class of speed, then the first name. A preference changes that order, a pin
//! narrows the devices; neither is ever dropped silently.

use crate::factory::Unavailable;
use crate::options::{Options, Prefer};
use crate::registry::{Origin, RegisteredRoute, Registry, RegistryHost};
use crate::route::{ANY_MODEL_TYPE, Decline, Fitness, OpenRequest, Reason, Route, RouteError, Service};
use crate::split::{Split, SplitRoute};
use crate::uri::{DeviceAddress, DeviceChoice, DeviceUri};
use crate::witness::Witness;
use npuhal_core::card::{DeviceCard, Generation};
use npuhal_core::stage::Session;
use npuhal_models::ModelSource;
use npuhal_models::source::Format;
use std::cmp::Ordering;
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// What is to be run.
#[derive(Debug, Clone, Default)]
pub struct Request {
    /// Device.
    pub device: DeviceChoice,
    /// Layers by device, in place of `device`; their options are those of the parts.
    pub split: Option<Split>,
    /// What matters most; `None` is the order of precedence.
    pub prefer: Option<Prefer>,
    /// Positions that prompt and answer need; 0 where that is not known yet.
    pub needed_positions: u32,
    /// Options of the session.
    pub options: Options,
}

/// A factory's answer to `enumerate`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FactoryReport {
    /// The factory.
    pub name: String,
    /// Where it comes from.
    pub origin: Origin,
    /// What it looks for.
    pub generations: Vec<Generation>,
    /// Whether it looked at the machine; a factory of virtual devices did not.
    pub looks_for_hardware: bool,
    /// Devices it found.
    pub found: usize,
    /// Where it looked in vain; empty when it found something.
    pub absence: String,
}

impl FactoryReport {
    /// Whether it looked for NPU hardware.
    #[must_use]
    pub fn looked_for_npus(&self) -> bool {
        self.looks_for_hardware && self.generations.iter().any(|&kind| kind != Generation::Cpu)
    }
}

/// Whether a device can be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeviceCheck {
    /// Not asked: the choice does not need it.
    NotAsked,
    /// It can.
    Usable,
    /// It cannot.
    Unavailable(Unavailable),
}

/// A device that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceReport {
    /// The device.
    pub card: DeviceCard,
    /// Name of the factory that found it.
    pub factory: String,
    /// Result of its check.
    pub check: DeviceCheck,
}

/// What became of a route.
#[derive(Debug, Clone, PartialEq)]
pub enum RouteOutcome {
    /// A route of the same name and a later origin stands in its place.
    Shadowed {
        /// The other's origin.
        by: Origin,
    },
    /// It runs other model types.
    OtherModel,
    /// It declined.
    Declined(Decline),
    /// It would run the model, but not on the pinned device.
    OtherDevice(Service),
    /// It would run the model, but its window cannot hold the request.
    WindowTooSmall(Service),
    /// It would run the model.
    Serves(Service),
}

/// A route that was considered.
#[derive(Debug, Clone, PartialEq)]
pub struct RouteReport {
    /// The route.
    pub name: String,
    /// Where it comes from.
    pub origin: Origin,
    /// What became of it.
    pub outcome: RouteOutcome,
}

/// The whole record of a choice: data for `routes` and `devices`, and the source of the one line that `run` prints.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Model type of the model.
    pub model_type: String,
    /// What `--device` said.
    pub device: DeviceChoice,
    /// The preference.
    pub prefer: Option<Prefer>,
    /// Positions the request needs.
    pub needed_positions: u32,
    /// Factories that were asked.
    pub factories: Vec<FactoryReport>,
    /// Devices that were found.
    pub devices: Vec<DeviceReport>,
    /// Routes in order of precedence.
    pub routes: Vec<RouteReport>,
    /// Index of the winner in `routes`.
    pub winner: Option<usize>,
    /// What the choice costs, for people; e.g. a better route whose window is too small.
    pub trade_offs: Vec<String>,
}

/// A choice.
#[derive(Clone)]
pub struct Choice {
    /// The route.
    pub route: Arc<dyn Route>,
    /// How it will run the model.
    pub service: Service,
    /// How it was chosen.
    pub decision: Decision,
}

impl Choice {
    /// Opens the chosen session.
    ///
    /// # Errors
    /// As [`Route::open`].
    pub fn open(&self, registry: &Registry, model: &ModelSource, options: &Options) -> Result<Session, RouteError> {
        self.open_through(&RegistryHost::new(registry, self.pinned()), model, options)
    }

    /// The same, with `witness` watching every device that the session opens.
    ///
    /// # Errors
    /// As [`Route::open`].
    pub fn open_witnessed(
        &self,
        registry: &Registry,
        model: &ModelSource,
        options: &Options,
        witness: &Witness,
    ) -> Result<Session, RouteError> {
        self.open_through(&RegistryHost::new(registry, self.pinned()).watched_by(witness), model, options)
    }

    fn pinned(&self) -> Option<&DeviceUri> {
        match &self.decision.device {
            DeviceChoice::Auto => None,
            DeviceChoice::Pinned(uri) => Some(uri),
        }
    }

    fn open_through(
        &self,
        host: &RegistryHost<'_>,
        model: &ModelSource,
        options: &Options,
    ) -> Result<Session, RouteError> {
        let (devices, options) = (self.decision.usable_devices(), options.limited_to(self.route.option_keys()));
        let service = &self.service;
        self.route.open(OpenRequest { model, service, devices: &devices, options: &options, host })
    }
}

impl fmt::Debug for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Choice")
            .field("route", &self.route.name())
            .field("service", &self.service)
            .field("decision", &self.decision)
            .finish()
    }
}

/// Why there is no choice.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum SelectionProblem {
    /// The pinned device is not there.
    #[error("there is no device '{device}'{}; found: {found}", in_brackets(absence))]
    NoSuchDevice {
        /// What was pinned.
        device: String,
        /// Where it was looked for; may be empty.
        absence: String,
        /// Ids that were found, separated by commas.
        found: String,
    },
    /// The pinned device is there but cannot be used.
    #[error("device {device} cannot be used: {unavailable}")]
    DeviceUnavailable {
        /// What was pinned.
        device: String,
        /// Why, and what mends it.
        unavailable: Unavailable,
    },
    /// No route runs the model on the pinned device.
    #[error("device {device} cannot run this model of type {model_type}{}", after_colon(reasons))]
    DeviceCannotServe {
        /// What was pinned.
        device: String,
        /// The model's type.
        model_type: String,
        /// What the routes said, each with its name.
        reasons: Vec<String>,
    },
    /// A route says that the model cannot be run without it.
    #[error("this model of type {model_type} needs the route {route}: {reason}")]
    RouteRequired {
        /// The route.
        route: String,
        /// The model's type.
        model_type: String,
        /// Why it cannot serve now.
        reason: Reason,
    },
    /// The request is longer than every window.
    #[error(
        "the request needs {needed} positions; the largest window is {window} (route {route}); raise --context or shorten the prompt"
    )]
    WindowTooSmall {
        /// Positions needed.
        needed: u32,
        /// Largest window.
        window: u32,
        /// Whose it is.
        route: String,
    },
    /// No route runs the model.
    #[error("no route runs this model of type '{model_type}' here{}{}", after_colon(reasons), known_types(known))]
    NoRoute {
        /// The model's type.
        model_type: String,
        /// What the routes said, each with its name.
        reasons: Vec<String>,
        /// Model types that routes name, separated by commas; may be empty.
        known: String,
    },
}

/// No choice: the problem, and the record of what was considered.
#[derive(Debug, Error)]
#[error("{problem}")]
pub struct SelectionError {
    /// The problem.
    pub problem: SelectionProblem,
    /// How far it came.
    pub decision: Box<Decision>,
}

/// Chooses a route and a device for `model`.
///
/// # Errors
/// A pin that cannot be served, a route that is required and cannot serve, a request that fits no window, or no route at all.
pub fn select(registry: &Registry, model: &ModelSource, request: &Request) -> Result<Choice, SelectionError> {
    let Some(split) = &request.split else { return select_among(registry, model, request) };
    let route = SplitRoute::new(registry.clone(), split.clone());
    // Its devices are named, so it is held to them as a pinned route is.
    let request = Request { split: None, device: split.main_device(), ..request.clone() };
    select_among(&registry.with_only_route(Arc::new(route)), model, &request)
}

fn select_among(registry: &Registry, model: &ModelSource, request: &Request) -> Result<Choice, SelectionError> {
    let mut decision = survey(registry, model, request);
    match choose(registry, model, request, &mut decision) {
        Ok((route, service)) => Ok(Choice { route, service, decision }),
        Err(problem) => Err(SelectionError { problem, decision: Box::new(decision) }),
    }
}

/// Asks the factories; no route is asked yet. Also what `devices` prints: with [`DeviceChoice::Auto`] every device is checked
/// but virtual ones.
#[must_use]
pub fn survey_devices(registry: &Registry, device: &DeviceChoice) -> (Vec<FactoryReport>, Vec<DeviceReport>) {
    let mut factories = Vec::new();
    let mut devices: Vec<DeviceReport> = Vec::new();
    for known in registry.factories() {
        let factory = &known.factory;
        let mut cards = factory.enumerate();
        factories.push(FactoryReport {
            name: factory.name().to_owned(),
            origin: known.origin.clone(),
            generations: factory.generations().to_vec(),
            looks_for_hardware: factory.looks_for_hardware(),
            found: cards.len(),
            absence: if cards.is_empty() { factory.absence() } else { String::new() },
        });
        if let DeviceChoice::Pinned(uri) = device
            && let Some(card) = factory.resolve(uri)
            && !cards.iter().any(|other| other.id == card.id)
        {
            cards.push(card);
        }
        // Of two factories that find the same device the one of the later origin keeps it.
        cards.retain(|card| !devices.iter().any(|other| other.card.id == card.id));
        devices.extend(cards.into_iter().map(|card| {
            let check = if is_asked(&card, device) {
                factory.check(&card).map_or_else(DeviceCheck::Unavailable, |()| DeviceCheck::Usable)
            } else {
                DeviceCheck::NotAsked
            };
            DeviceReport { card, factory: factory.name().to_owned(), check }
        }));
    }
    (factories, devices)
}

/// A pin needs its device, and the CPU for what the device leaves over.
fn is_asked(card: &DeviceCard, device: &DeviceChoice) -> bool {
    match device {
        DeviceChoice::Auto => !card.is_virtual,
        DeviceChoice::Pinned(uri) => card.id == uri.id() || card.generation == Generation::Cpu,
    }
}

fn survey(registry: &Registry, model: &ModelSource, request: &Request) -> Decision {
    let (factories, devices) = survey_devices(registry, &request.device);
    Decision {
        model_type: model.config().model_type.clone(),
        device: request.device.clone(),
        prefer: request.prefer,
        needed_positions: request.needed_positions,
        factories,
        devices,
        routes: Vec::new(),
        winner: None,
        trade_offs: Vec::new(),
    }
}

fn choose(
    registry: &Registry,
    model: &ModelSource,
    request: &Request,
    decision: &mut Decision,
) -> Result<(Arc<dyn Route>, Service), SelectionProblem> {
    let pinned = match &request.device {
        DeviceChoice::Auto => None,
        DeviceChoice::Pinned(uri) => Some(uri.id()),
    };
    let usable = decision.usable_devices();
    if let DeviceChoice::Pinned(uri) = &request.device {
        check_pin(uri, decision)?;
    }
    decision.routes = ask_routes(registry, model, request, &usable, pinned.as_deref());
    refuse_without_required(decision)?;
    let winner = best(request.prefer, &usable, &decision.routes).map(|(index, service)| (index, service.clone()));
    let Some((index, service)) = winner else {
        return Err(no_winner(registry, decision, pinned));
    };
    decision.winner = Some(index);
    decision.trade_offs = trade_offs(decision, index, &service);
    let report = &decision.routes[index];
    let is_winner = |known: &&RegisteredRoute| known.route.name() == report.name && known.origin == report.origin;
    match registry.routes().iter().find(is_winner) {
        Some(known) => Ok((Arc::clone(&known.route), service)),
        None => Err(no_winner(registry, decision, pinned)),
    }
}

fn check_pin(uri: &DeviceUri, decision: &Decision) -> Result<(), SelectionProblem> {
    let id = uri.id();
    match decision.devices.iter().find(|report| report.card.id == id) {
        None => {
            let absence = match &uri.address {
                DeviceAddress::Npu(_) if !decision.looked_for_npus() => "this build has no NPU backend".to_owned(),
                DeviceAddress::Npu(_) => decision.npu_absence(),
                _ => String::new(),
            };
            let found = decision.devices.iter().map(|report| report.card.id.as_str()).collect::<Vec<_>>();
            let found = if found.is_empty() { "none".to_owned() } else { found.join(", ") };
            Err(SelectionProblem::NoSuchDevice { device: id, absence, found })
        }
        Some(DeviceReport { check: DeviceCheck::Unavailable(unavailable), .. }) => {
            Err(SelectionProblem::DeviceUnavailable { device: id, unavailable: unavailable.clone() })
        }
        Some(_) => Ok(()),
    }
}

fn ask_routes(
    registry: &Registry,
    model: &ModelSource,
    request: &Request,
    usable: &[DeviceCard],
    pinned: Option<&str>,
) -> Vec<RouteReport> {
    let mut reports: Vec<RouteReport> = Vec::new();
    for known in registry.routes() {
        let route = &known.route;
        let shadow = reports.iter().find(|other| other.name == route.name());
        let outcome = if let Some(other) = shadow {
            RouteOutcome::Shadowed { by: other.origin.clone() }
        } else if !is_for(model, known) {
            RouteOutcome::OtherModel
        } else {
            match route.fitness(model, usable, &request.options.limited_to(route.option_keys())) {
                Fitness::Declines(decline) => RouteOutcome::Declined(decline),
                Fitness::Serves(service) => place(service, request, usable, pinned),
            }
        };
        reports.push(RouteReport { name: route.name().to_owned(), origin: known.origin.clone(), outcome });
    }
    reports
}

/// Whether a route is asked about `model`. A model that npuhal did not read is only for add-ons that name its type.
fn is_for(model: &ModelSource, known: &RegisteredRoute) -> bool {
    let (types, model_type) = (known.route.model_types(), model.config().model_type.as_str());
    match model.format() {
        Format::Unread => known.origin != Origin::BuiltIn && types.contains(&model_type),
        _ => types.contains(&model_type) || types.contains(&ANY_MODEL_TYPE),
    }
}

fn place(service: Service, request: &Request, usable: &[DeviceCard], pinned: Option<&str>) -> RouteOutcome {
    if pinned.is_some_and(|id| id != service.device) {
        return RouteOutcome::OtherDevice(service);
    }
    // A pin, or a preference for the NPU, accepts a small window: older turns are left out.
    let accepts_small = pinned.is_some() || (request.prefer == Some(Prefer::Npu) && is_npu(&service, usable));
    if service.window < request.needed_positions && !accepts_small {
        return RouteOutcome::WindowTooSmall(service);
    }
    RouteOutcome::Serves(service)
}

fn is_npu(service: &Service, cards: &[DeviceCard]) -> bool {
    cards.iter().any(|card| card.id == service.device && card.generation != Generation::Cpu)
}

/// A required route that cannot serve is an error, unless one of a later origin serves.
fn refuse_without_required(decision: &Decision) -> Result<(), SelectionProblem> {
    for report in &decision.routes {
        let RouteOutcome::Declined(Decline::Required(reason)) = &report.outcome else { continue };
        let outranks = |other: &RouteReport| {
            matches!(other.outcome, RouteOutcome::Serves(_)) && other.origin.precedence() > report.origin.precedence()
        };
        if !decision.routes.iter().any(outranks) {
            return Err(SelectionProblem::RouteRequired {
                route: report.name.clone(),
                model_type: decision.model_type.clone(),
                reason: reason.clone(),
            });
        }
    }
    Ok(())
}

/// The best of the routes that serve.
fn best<'a>(prefer: Option<Prefer>, cards: &[DeviceCard], routes: &'a [RouteReport]) -> Option<(usize, &'a Service)> {
    let serving = || {
        routes.iter().enumerate().filter_map(|(index, report)| match &report.outcome {
            RouteOutcome::Serves(service) => Some((index, report, service)),
            _ => None,
        })
    };
    // Figures are compared only where every candidate has one: a mixed order would not be an order.
    let by_figures = serving().all(|(_, _, service)| service.expected.is_some());
    let compare = |a: (&RouteReport, &Service), b: (&RouteReport, &Service)| {
        let preferred = match prefer {
            None => Ordering::Equal,
            Some(Prefer::Npu) => is_npu(b.1, cards).cmp(&is_npu(a.1, cards)),
            Some(Prefer::Speed) if by_figures => figure(b.1).total_cmp(&figure(a.1)),
            Some(Prefer::Speed) => b.1.speed.cmp(&a.1.speed),
            Some(Prefer::Context) => b.1.window.cmp(&a.1.window),
        };
        preferred
            .then_with(|| b.0.origin.precedence().cmp(&a.0.origin.precedence()))
            .then_with(|| b.1.speed.cmp(&a.1.speed))
            .then_with(|| a.0.name.cmp(&b.0.name))
    };
    serving().min_by(|a, b| compare((a.1, a.2), (b.1, b.2))).map(|(index, _, service)| (index, service))
}

fn figure(service: &Service) -> f64 {
    service.expected.map_or(0.0, |expected| expected.tokens_per_second)
}

fn trade_offs(decision: &Decision, winner: usize, service: &Service) -> Vec<String> {
    let mut notes = Vec::new();
    if service.window < decision.needed_positions {
        notes.push(format!(
            "the window of {} positions is smaller than the {} the request needs; older turns are left out",
            service.window, decision.needed_positions
        ));
    }
    for (index, report) in decision.routes.iter().enumerate() {
        match &report.outcome {
            RouteOutcome::WindowTooSmall(other) if other.speed > service.speed => notes.push(format!(
                "route {} on {} would be faster, but its window of {} positions cannot hold the {} the request needs; \
                 --prefer npu takes it anyway",
                report.name, other.device, other.window, decision.needed_positions
            )),
            RouteOutcome::Serves(other) if index != winner && decision.prefer.is_some() => {
                notes.extend(loss(report, other, service));
            }
            _ => {}
        }
    }
    notes
}

/// What a preference gave up.
fn loss(report: &RouteReport, other: &Service, winner: &Service) -> Option<String> {
    let faster = other.speed > winner.speed;
    let larger = other.window > winner.window;
    let what = match (faster, larger) {
        (true, true) => format!("would be faster and has a window of {} positions", other.window),
        (true, false) => "would be faster".to_owned(),
        (false, true) => format!("has a window of {} positions instead of {}", other.window, winner.window),
        (false, false) => return None,
    };
    Some(format!("route {} on {} {what}", report.name, other.device))
}

fn no_winner(registry: &Registry, decision: &Decision, pinned: Option<String>) -> SelectionProblem {
    let largest = decision
        .routes
        .iter()
        .filter_map(|report| match &report.outcome {
            RouteOutcome::WindowTooSmall(service) => Some((service.window, report)),
            _ => None,
        })
        .max_by_key(|(window, _)| *window);
    if let Some((window, report)) = largest {
        let (needed, route) = (decision.needed_positions, report.name.clone());
        return SelectionProblem::WindowTooSmall { needed, window, route };
    }
    let (model_type, reasons) = (decision.model_type.clone(), reasons(decision));
    match pinned {
        Some(device) => SelectionProblem::DeviceCannotServe { device, model_type, reasons },
        None => SelectionProblem::NoRoute { model_type, reasons, known: registry.model_types().join(", ") },
    }
}

fn reasons(decision: &Decision) -> Vec<String> {
    let told = decision.routes.iter().filter_map(|report| match &report.outcome {
        RouteOutcome::Declined(decline) => decline.reason().map(|reason| format!("route {}: {reason}", report.name)),
        RouteOutcome::OtherDevice(service) => Some(format!("route {} runs it on {}", report.name, service.device)),
        _ => None,
    });
    no_route_for_the_pin(decision).into_iter().chain(told).chain(unusable(decision)).collect()
}

/// Where no route has a word to say about the pinned device.
fn no_route_for_the_pin(decision: &Decision) -> Option<String> {
    let has_reason = |report: &RouteReport| match &report.outcome {
        RouteOutcome::Declined(decline) => decline.reason().is_some(),
        _ => false,
    };
    let is_silent = decision.device != DeviceChoice::Auto && !decision.routes.iter().any(has_reason);
    is_silent.then(|| "no route of this build runs it there".to_owned())
}

/// Non-virtual devices that failed their check.
fn unusable(decision: &Decision) -> impl Iterator<Item = String> {
    decision.devices.iter().filter_map(|report| match &report.check {
        DeviceCheck::Unavailable(unavailable) => Some(format!("{} cannot be used: {unavailable}", report.card.id)),
        _ => None,
    })
}

impl Decision {
    /// The winner's report and service.
    #[must_use]
    pub fn winning(&self) -> Option<(&RouteReport, &Service)> {
        let report = self.routes.get(self.winner?)?;
        match &report.outcome {
            RouteOutcome::Serves(service) => Some((report, service)),
            _ => None,
        }
    }

    /// Devices that were found and passed their check.
    #[must_use]
    pub fn usable_devices(&self) -> Vec<DeviceCard> {
        let usable = self.devices.iter().filter(|report| report.check == DeviceCheck::Usable);
        usable.map(|report| report.card.clone()).collect()
    }

    /// Memory that the route of `report` would take with `positions` positions of context; `None` where it does not say, or
    /// would not serve with so many.
    #[must_use]
    pub fn memory_at(
        &self,
        registry: &Registry,
        model: &ModelSource,
        report: &RouteReport,
        options: &Options,
        positions: u32,
    ) -> Option<u64> {
        let known = registry
            .routes()
            .iter()
            .find(|known| known.route.name() == report.name && known.origin == report.origin)?;
        let options = Options { context_positions: Some(positions), ..options.limited_to(known.route.option_keys()) };
        match known.route.fitness(model, &self.usable_devices(), &options) {
            Fitness::Serves(service) if service.window == positions => service.memory_bytes,
            _ => None,
        }
    }

    /// Whether any factory looks for NPU hardware.
    #[must_use]
    pub fn looked_for_npus(&self) -> bool {
        self.factories.iter().any(FactoryReport::looked_for_npus)
    }

    /// Where NPU hardware was looked for in vain.
    fn npu_absence(&self) -> String {
        let looked = self.factories.iter().filter(|factory| factory.looked_for_npus() && !factory.absence.is_empty());
        looked.map(|factory| factory.absence.as_str()).collect::<Vec<_>>().join("; ")
    }

    /// One line: what was found, what is used.
    #[must_use]
    pub fn line(&self) -> String {
        let Some((report, service)) = self.winning() else {
            return "nothing was chosen".to_owned();
        };
        let on_cpu = self.card(&service.device).is_none_or(|card| card.generation == Generation::Cpu);
        let device = if on_cpu { "the CPU" } else { service.device.as_str() };
        let mut details = Vec::new();
        if !on_cpu || report.origin != Origin::BuiltIn {
            details.push(format!("route {}", report.name));
        }
        if !service.detail.is_empty() {
            details.push(service.detail.clone());
        }
        let details = if details.is_empty() { String::new() } else { format!(" ({})", details.join(", ")) };
        let mut parts = Vec::new();
        if self.device == DeviceChoice::Auto {
            if on_cpu {
                parts.push(self.npu_statement());
            }
            parts.extend(self.told());
        }
        parts.push(format!("using {device}{details}"));
        parts.join("; ")
    }

    /// Why no NPU is used. Says "no NPU found" only where somebody looked.
    fn npu_statement(&self) -> String {
        let npus = self.devices.iter().filter(|report| is_npu_hardware(&report.card));
        let statements: Vec<String> = npus
            .map(|report| match &report.check {
                DeviceCheck::Unavailable(unavailable) => format!("{} cannot be used: {unavailable}", report.card.id),
                _ if self.has_route_on(&report.card.id) => {
                    format!("{} was found but is not used for this request", report.card.id)
                }
                _ => format!(
                    "{} was found, but no route of this build runs models of type {} on it",
                    report.card.id, self.model_type
                ),
            })
            .collect();
        if !statements.is_empty() {
            return statements.join("; ");
        }
        if self.looked_for_npus() {
            return format!("no NPU found{}", in_brackets(&self.npu_absence()));
        }
        "this build has no NPU backend".to_owned()
    }

    /// Whether a route would run the model on the device, or has told why it cannot now.
    fn has_route_on(&self, device: &str) -> bool {
        self.routes.iter().any(|report| match &report.outcome {
            RouteOutcome::OtherDevice(service)
            | RouteOutcome::WindowTooSmall(service)
            | RouteOutcome::Serves(service) => service.device == device,
            RouteOutcome::Declined(decline) => decline.is_told(),
            _ => false,
        })
    }

    /// Declines that the user is told.
    fn told(&self) -> impl Iterator<Item = String> {
        self.routes.iter().filter_map(|report| match &report.outcome {
            RouteOutcome::Declined(decline) if decline.is_told() => {
                decline.reason().map(|reason| format!("route {} is not available: {reason}", report.name))
            }
            _ => None,
        })
    }

    fn card(&self, id: &str) -> Option<&DeviceCard> {
        self.devices.iter().map(|report| &report.card).find(|card| card.id == id)
    }
}

fn is_npu_hardware(card: &DeviceCard) -> bool {
    card.generation != Generation::Cpu && !card.is_virtual
}

fn in_brackets(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ({text})") }
}

fn known_types(known: &str) -> String {
    if known.is_empty() { String::new() } else { format!("; types that routes name: {known}") }
}

fn after_colon(reasons: &[String]) -> String {
    if reasons.is_empty() { String::new() } else { format!(": {}", reasons.join("; ")) }
}
