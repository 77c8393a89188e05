//! The set of routes and factories of this process, with their origins.

use crate::addon::{AddonError, AddonReport};
use crate::cost::DeviceCost;
use crate::extension::{Command, CommandEntry, Encoder, EncoderEntry, ExtensionError};
use crate::factory::{DeviceFactory, Unavailable};
use crate::options::{Numerics, Options};
use crate::parity::Tolerance;
use crate::route::{ANY_MODEL_TYPE, Fitness, Host, OpenRequest, Route, RouteError, SegmentRequest, Service};
use crate::span::SegmentSpan;
use crate::uri::DeviceUri;
use crate::witness::Witness;
use npuhal_core::device::Device;
use npuhal_core::stage::{Segment, Session};
use npuhal_core::{DeviceCard, DeviceError, Generation};
use npuhal_models::ModelSource;
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use thiserror::Error;

/// A route submitted by a linked crate; see [`crate::register_route`].
pub struct RouteEntry {
    /// The route.
    pub route: &'static dyn Route,
    /// Name of the submitting package; the host derives the origin from it.
    pub package: &'static str,
}

inventory::collect!(RouteEntry);

/// A device factory submitted by a linked crate; see [`crate::register_factory`].
pub struct FactoryEntry {
    /// The factory.
    pub factory: &'static dyn DeviceFactory,
    /// Name of the submitting package; the host derives the origin from it.
    pub package: &'static str,
}

inventory::collect!(FactoryEntry);

/// Submits a route (a constant expression) to the registry of the program that links the calling crate. The program must
/// name the crate (`use addon as _;`), or nothing is submitted.
#[macro_export]
macro_rules! register_route {
    ($route:expr) => {
        $crate::inventory::submit! {
            $crate::RouteEntry { route: &$route, package: ::core::env!("CARGO_PKG_NAME") }
        }
    };
}

/// Submits a device factory (a constant expression); as [`register_route`].
#[macro_export]
macro_rules! register_factory {
    ($factory:expr) => {
        $crate::inventory::submit! {
            $crate::FactoryEntry { factory: &$factory, package: ::core::env!("CARGO_PKG_NAME") }
        }
    };
}

/// Where a route or factory comes from. A later origin has precedence over an earlier one, whatever the link order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Origin {
    /// Part of npuhal.
    BuiltIn,
    /// A crate that the program's author added.
    LinkedAddOn {
        /// The crate.
        package: String,
    },
    /// A library opened at run time.
    LoadedAddOn {
        /// Position in load order, from 0.
        order: usize,
        /// The library.
        file: PathBuf,
    },
}

impl Origin {
    /// 0 for built-in, 1 for linked, 2 for loaded: names are unique at each level.
    #[must_use]
    pub fn level(&self) -> u8 {
        match self {
            Self::BuiltIn => 0,
            Self::LinkedAddOn { .. } => 1,
            Self::LoadedAddOn { .. } => 2,
        }
    }

    /// Key of precedence: higher comes first. Linked add-ons are equal among each other, so that link order decides nothing.
    #[must_use]
    pub fn precedence(&self) -> (u8, usize) {
        match self {
            Self::LoadedAddOn { order, .. } => (self.level(), *order),
            _ => (self.level(), 0),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn => f.write_str("built-in"),
            Self::LinkedAddOn { package } => write!(f, "linked add-on {package}"),
            Self::LoadedAddOn { file, .. } => write!(f, "loaded add-on {}", file.display()),
        }
    }
}

/// Two registrations of one name at one level.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The same name twice.
    #[error("the {kind} '{name}' is registered twice: by {first} and by {second}; remove or rename one")]
    Duplicate {
        /// `route` or `device factory`.
        kind: &'static str,
        /// The name.
        name: String,
        /// Who registered it first, in text.
        first: String,
        /// Who registered it again.
        second: String,
    },
    /// A subcommand with the name of one of the program's own.
    #[error("the command '{name}' of the {origin} has the name of a command of the program; rename it")]
    ReservedCommand {
        /// The name.
        name: String,
        /// Who registered it, in text.
        origin: String,
    },
}

fn reserved_command(name: &str, origin: &Origin) -> RegistryError {
    RegistryError::ReservedCommand { name: name.to_owned(), origin: origin.to_string() }
}

/// A route with its origin.
#[derive(Clone)]
pub struct RegisteredRoute {
    /// The route.
    pub route: Arc<dyn Route>,
    /// Where it comes from.
    pub origin: Origin,
    /// Name of the submitting package or library, for messages.
    pub package: String,
}

/// A factory with its origin.
#[derive(Clone)]
pub struct RegisteredFactory {
    /// The factory.
    pub factory: Arc<dyn DeviceFactory>,
    /// Where it comes from.
    pub origin: Origin,
    /// Name of the submitting package or library, for messages.
    pub package: String,
}

/// A subcommand with its origin.
#[derive(Clone)]
pub struct RegisteredCommand {
    /// The command.
    pub command: Arc<dyn Command>,
    /// Where it comes from.
    pub origin: Origin,
    /// Name of the submitting package or library, for messages.
    pub package: String,
}

/// An encoder with its origin.
#[derive(Clone)]
pub struct RegisteredEncoder {
    /// The encoder.
    pub encoder: Arc<dyn Encoder>,
    /// Where it comes from.
    pub origin: Origin,
    /// Name of the submitting package or library, for messages.
    pub package: String,
}

/// The routes, factories, subcommands and encoders of this process, each in order of precedence (highest first, then by name).
#[derive(Clone, Default)]
pub struct Registry {
    routes: Vec<RegisteredRoute>,
    factories: Vec<RegisteredFactory>,
    commands: Vec<RegisteredCommand>,
    encoders: Vec<RegisteredEncoder>,
    reserved_commands: Vec<String>,
    addons: Vec<AddonReport>,
}

impl Registry {
    /// An empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Collects what the linked crates submitted. Packages named in `built_in` are part of the program; all others are
    /// linked add-ons.
    ///
    /// # Errors
    /// [`RegistryError::Duplicate`].
    pub fn collect(built_in: &[&str]) -> Result<Self, RegistryError> {
        let origin = |package: &str| {
            if built_in.contains(&package) {
                Origin::BuiltIn
            } else {
                Origin::LinkedAddOn { package: package.to_owned() }
            }
        };
        let mut registry = Self::new();
        for entry in inventory::iter::<RouteEntry> {
            registry.add_route(Arc::new(StaticRoute(entry.route)), origin(entry.package), entry.package)?;
        }
        for entry in inventory::iter::<FactoryEntry> {
            registry.add_factory(Arc::new(StaticFactory(entry.factory)), origin(entry.package), entry.package)?;
        }
        for entry in inventory::iter::<CommandEntry> {
            registry.add_command(Arc::new(StaticCommand(entry.command)), origin(entry.package), entry.package)?;
        }
        for entry in inventory::iter::<EncoderEntry> {
            registry.add_encoder(Arc::new(StaticEncoder(entry.encoder)), origin(entry.package), entry.package)?;
        }
        Ok(registry)
    }

    /// Names of subcommands that add-ons cannot take, since the program has commands of these names.
    ///
    /// # Errors
    /// [`RegistryError::ReservedCommand`] for one that is registered already.
    pub fn reserve_commands(&mut self, names: impl IntoIterator<Item = String>) -> Result<(), RegistryError> {
        self.reserved_commands.extend(names);
        match self.commands.iter().find(|known| self.reserved_commands.iter().any(|name| name == known.command.name()))
        {
            Some(known) => Err(reserved_command(known.command.name(), &known.origin)),
            None => Ok(()),
        }
    }

    /// Loads add-ons in this order and registers what they offer. One that cannot be loaded is reported and leaves the
    /// registry as it was; the others are loaded all the same. [`Registry::addons`] has a report of each.
    pub fn load_addons(&mut self, files: &[PathBuf]) -> Vec<AddonError> {
        let mut errors = Vec::new();
        for file in files {
            let order = self.addons.len();
            let (report, registered) = crate::addon::load(self, file, order);
            errors.extend(report.error.clone());
            if let Some(registered) = registered {
                *self = registered;
            }
            self.addons.push(report);
        }
        errors
    }

    /// The add-ons that were to be loaded, in load order.
    #[must_use]
    pub fn addons(&self) -> &[AddonReport] {
        &self.addons
    }

    /// Adds a route.
    ///
    /// # Errors
    /// [`RegistryError::Duplicate`]; the registry is unchanged then.
    pub fn add_route(&mut self, route: Arc<dyn Route>, origin: Origin, package: &str) -> Result<(), RegistryError> {
        let known = self.routes.iter().map(|known| (known.route.name(), &known.origin, known.package.as_str()));
        refuse_duplicate("route", route.name(), &origin, package, known)?;
        self.routes.push(RegisteredRoute { route, origin, package: package.to_owned() });
        self.routes.sort_by(|a, b| order((&a.origin, a.route.name()), (&b.origin, b.route.name())));
        Ok(())
    }

    /// Adds a factory.
    ///
    /// # Errors
    /// [`RegistryError::Duplicate`]; the registry is unchanged then.
    pub fn add_factory(
        &mut self,
        factory: Arc<dyn DeviceFactory>,
        origin: Origin,
        package: &str,
    ) -> Result<(), RegistryError> {
        let known = self.factories.iter().map(|known| (known.factory.name(), &known.origin, known.package.as_str()));
        refuse_duplicate("device factory", factory.name(), &origin, package, known)?;
        self.factories.push(RegisteredFactory { factory, origin, package: package.to_owned() });
        self.factories.sort_by(|a, b| order((&a.origin, a.factory.name()), (&b.origin, b.factory.name())));
        Ok(())
    }

    /// Adds a subcommand.
    ///
    /// # Errors
    /// [`RegistryError::Duplicate`], [`RegistryError::ReservedCommand`]; the registry is unchanged then.
    pub fn add_command(
        &mut self,
        command: Arc<dyn Command>,
        origin: Origin,
        package: &str,
    ) -> Result<(), RegistryError> {
        if self.reserved_commands.iter().any(|name| name == command.name()) {
            return Err(reserved_command(command.name(), &origin));
        }
        let known = self.commands.iter().map(|known| (known.command.name(), &known.origin, known.package.as_str()));
        refuse_duplicate("command", command.name(), &origin, package, known)?;
        self.commands.push(RegisteredCommand { command, origin, package: package.to_owned() });
        self.commands.sort_by(|a, b| order((&a.origin, a.command.name()), (&b.origin, b.command.name())));
        Ok(())
    }

    /// Adds an encoder.
    ///
    /// # Errors
    /// [`RegistryError::Duplicate`]; the registry is unchanged then.
    pub fn add_encoder(
        &mut self,
        encoder: Arc<dyn Encoder>,
        origin: Origin,
        package: &str,
    ) -> Result<(), RegistryError> {
        let known = self.encoders.iter().map(|known| (known.encoder.name(), &known.origin, known.package.as_str()));
        refuse_duplicate("encoder", encoder.name(), &origin, package, known)?;
        self.encoders.push(RegisteredEncoder { encoder, origin, package: package.to_owned() });
        self.encoders.sort_by(|a, b| order((&a.origin, a.encoder.name()), (&b.origin, b.encoder.name())));
        Ok(())
    }

    /// The same devices, commands and encoders with `route` alone: for a session whose route is fixed beforehand.
    #[must_use]
    pub fn with_only_route(&self, route: Arc<dyn Route>) -> Self {
        let only = RegisteredRoute { route, origin: Origin::BuiltIn, package: env!("CARGO_PKG_NAME").to_owned() };
        Self { routes: vec![only], ..self.clone() }
    }

    /// The subcommands, highest precedence first.
    #[must_use]
    pub fn commands(&self) -> &[RegisteredCommand] {
        &self.commands
    }

    /// The subcommand called `name` with the highest precedence.
    #[must_use]
    pub fn command(&self, name: &str) -> Option<&RegisteredCommand> {
        self.commands.iter().find(|known| known.command.name() == name)
    }

    /// The encoders, highest precedence first.
    #[must_use]
    pub fn encoders(&self) -> &[RegisteredEncoder] {
        &self.encoders
    }

    /// The encoder called `name` with the highest precedence.
    #[must_use]
    pub fn encoder(&self, name: &str) -> Option<&RegisteredEncoder> {
        self.encoders.iter().find(|known| known.encoder.name() == name)
    }

    /// The routes, highest precedence first. A name may appear once at each level; the first one shadows the others.
    #[must_use]
    pub fn routes(&self) -> &[RegisteredRoute] {
        &self.routes
    }

    /// The factories, highest precedence first.
    #[must_use]
    pub fn factories(&self) -> &[RegisteredFactory] {
        &self.factories
    }

    /// The route called `name` with the highest precedence.
    #[must_use]
    pub fn route(&self, name: &str) -> Option<&RegisteredRoute> {
        self.routes.iter().find(|known| known.route.name() == name)
    }

    /// Option keys that routes have declared; for [`crate::Options::set`].
    #[must_use]
    pub fn option_keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = self.routes.iter().flat_map(|known| known.route.option_keys()).copied().collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Model types that some route names, ascending.
    #[must_use]
    pub fn model_types(&self) -> Vec<&str> {
        let mut types: Vec<&str> = self.routes.iter().flat_map(|known| known.route.model_types()).copied().collect();
        types.retain(|name| *name != ANY_MODEL_TYPE);
        types.sort_unstable();
        types.dedup();
        types
    }

    /// The factory that knows `uri`, with the device's card.
    #[must_use]
    pub fn resolve(&self, uri: &DeviceUri) -> Option<(&RegisteredFactory, DeviceCard)> {
        self.factories.iter().find_map(|known| known.factory.resolve(uri).map(|card| (known, card)))
    }
}

/// [`Host`] over a registry.
pub struct RegistryHost<'a> {
    registry: &'a Registry,
    pinned: Option<&'a DeviceUri>,
    witness: Option<&'a Witness>,
}

impl<'a> RegistryHost<'a> {
    /// A host; `pinned` is the device the user named, with its parameters.
    #[must_use]
    pub fn new(registry: &'a Registry, pinned: Option<&'a DeviceUri>) -> Self {
        Self { registry, pinned, witness: None }
    }

    /// The same, with `witness` watching every device it opens.
    #[must_use]
    pub fn watched_by(self, witness: &'a Witness) -> Self {
        Self { witness: Some(witness), ..self }
    }
}

impl Host for RegistryHost<'_> {
    fn open_device(&self, id: &str) -> Result<Box<dyn Device>, RouteError> {
        let missing = || RouteError::NoDevice { device: id.to_owned(), known: device_ids(self.registry) };
        let uri = match self.pinned {
            Some(uri) if uri.id() == id => uri.clone(),
            _ => id.parse().map_err(|_| missing())?,
        };
        let (known, _) = self.registry.resolve(&uri).ok_or_else(missing)?;
        let device = known.factory.open(&uri)?;
        Ok(match self.witness {
            Some(witness) => witness.watch(device),
            None => device,
        })
    }

    fn open_segment(&self, route: &str, request: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
        let known = self.registry.route(route).ok_or_else(|| RouteError::NoRoute {
            route: route.to_owned(),
            known: self.registry.routes().iter().map(|known| known.route.name()).collect::<Vec<_>>().join(", "),
        })?;
        let options = request.options.limited_to(known.route.option_keys());
        known.route.segment(SegmentRequest { options: &options, ..request })
    }

    fn pinned(&self) -> Option<&DeviceUri> {
        self.pinned
    }
}

fn device_ids(registry: &Registry) -> String {
    let cards = registry.factories().iter().flat_map(|known| known.factory.enumerate());
    cards.map(|card| card.id).collect::<Vec<_>>().join(", ")
}

fn order(a: (&Origin, &str), b: (&Origin, &str)) -> std::cmp::Ordering {
    b.0.precedence().cmp(&a.0.precedence()).then_with(|| a.1.cmp(b.1))
}

fn refuse_duplicate<'a>(
    kind: &'static str,
    name: &str,
    origin: &Origin,
    package: &str,
    known: impl Iterator<Item = (&'a str, &'a Origin, &'a str)>,
) -> Result<(), RegistryError> {
    let describe = |origin: &Origin, package: &str| match origin {
        Origin::BuiltIn => format!("{package} (built-in)"),
        _ => origin.to_string(),
    };
    for (known_name, known_origin, known_package) in known {
        if known_name == name && known_origin.level() == origin.level() {
            let (mut first, mut second) = (describe(known_origin, known_package), describe(origin, package));
            // Linked crates submit in link order; the message must not depend on it.
            if origin.level() < 2 && second < first {
                std::mem::swap(&mut first, &mut second);
            }
            return Err(RegistryError::Duplicate { kind, name: name.to_owned(), first, second });
        }
    }
    Ok(())
}

struct StaticRoute(&'static dyn Route);

impl Route for StaticRoute {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn model_types(&self) -> &[&str] {
        self.0.model_types()
    }

    fn option_keys(&self) -> &[&str] {
        self.0.option_keys()
    }

    fn fitness(&self, model: &ModelSource, devices: &[DeviceCard], options: &Options) -> Fitness {
        self.0.fitness(model, devices, options)
    }

    fn segment(&self, request: SegmentRequest<'_>) -> Result<Box<dyn Segment>, RouteError> {
        self.0.segment(request)
    }

    fn segment_on(
        &self,
        request: SegmentRequest<'_>,
        device: &str,
        host: &dyn Host,
    ) -> Result<Box<dyn Segment>, RouteError> {
        self.0.segment_on(request, device, host)
    }

    fn part_service(
        &self,
        model: &ModelSource,
        span: &SegmentSpan,
        device: &DeviceCard,
        options: &Options,
    ) -> Option<Service> {
        self.0.part_service(model, span, device, options)
    }

    fn tolerance(&self, model: &ModelSource, options: &Options) -> Tolerance {
        self.0.tolerance(model, options)
    }

    fn twin_tolerance(&self, model: &ModelSource, options: &Options, twin: Numerics) -> Option<Tolerance> {
        self.0.twin_tolerance(model, options, twin)
    }

    fn cost(&self, model: &ModelSource, device: &DeviceCard, options: &Options) -> Option<DeviceCost> {
        self.0.cost(model, device, options)
    }

    fn open(&self, request: OpenRequest<'_>) -> Result<Session, RouteError> {
        self.0.open(request)
    }
}

struct StaticFactory(&'static dyn DeviceFactory);

impl DeviceFactory for StaticFactory {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn generations(&self) -> &[Generation] {
        self.0.generations()
    }

    fn looks_for_hardware(&self) -> bool {
        self.0.looks_for_hardware()
    }

    fn enumerate(&self) -> Vec<DeviceCard> {
        self.0.enumerate()
    }

    fn absence(&self) -> String {
        self.0.absence()
    }

    fn resolve(&self, uri: &DeviceUri) -> Option<DeviceCard> {
        self.0.resolve(uri)
    }

    fn check(&self, card: &DeviceCard) -> Result<(), Unavailable> {
        self.0.check(card)
    }

    fn open(&self, uri: &DeviceUri) -> Result<Box<dyn Device>, DeviceError> {
        self.0.open(uri)
    }
}

struct StaticCommand(&'static dyn Command);

impl Command for StaticCommand {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn help(&self) -> &str {
        self.0.help()
    }

    fn run(&self, arguments: &[String], output: &mut dyn Write) -> Result<u8, ExtensionError> {
        self.0.run(arguments, output)
    }
}

struct StaticEncoder(&'static dyn Encoder);

impl Encoder for StaticEncoder {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn dims(&self) -> usize {
        self.0.dims()
    }

    fn encode(&self, text: &str) -> Result<Vec<f32>, ExtensionError> {
        self.0.encode(text)
    }
}
