"""The facts and word lists from which the demo model's texts are made."""

# "country=capital", written the way the country is named inside a sentence.
_CAPITALS = """
Afghanistan=Kabul;Albania=Tirana;Algeria=Algiers;Andorra=Andorra la Vella;
Angola=Luanda;Argentina=Buenos Aires;Armenia=Yerevan;Australia=Canberra;
Austria=Vienna;Azerbaijan=Baku;the Bahamas=Nassau;Bahrain=Manama;
Bangladesh=Dhaka;Barbados=Bridgetown;Belarus=Minsk;Belgium=Brussels;
Belize=Belmopan;Benin=Porto-Novo;Bhutan=Thimphu;Bolivia=Sucre;
Bosnia and Herzegovina=Sarajevo;Botswana=Gaborone;Brazil=Brasilia;
Brunei=Bandar Seri Begawan;Bulgaria=Sofia;Burkina Faso=Ouagadougou;
Burundi=Gitega;Cambodia=Phnom Penh;Cameroon=Yaounde;Canada=Ottawa;
Cape Verde=Praia;Chad=N'Djamena;Chile=Santiago;China=Beijing;
Colombia=Bogota;Costa Rica=San Jose;Croatia=Zagreb;Cuba=Havana;
Cyprus=Nicosia;the Czech Republic=Prague;Denmark=Copenhagen;
Djibouti=Djibouti;Dominica=Roseau;the Dominican Republic=Santo Domingo;
East Timor=Dili;Ecuador=Quito;Egypt=Cairo;El Salvador=San Salvador;
Eritrea=Asmara;Estonia=Tallinn;Eswatini=Mbabane;Ethiopia=Addis Ababa;
Fiji=Suva;Finland=Helsinki;France=Paris;Gabon=Libreville;the Gambia=Banjul;
Georgia=Tbilisi;Germany=Berlin;Ghana=Accra;Greece=Athens;
Grenada=Saint George's;Guatemala=Guatemala City;Guinea=Conakry;
Guinea-Bissau=Bissau;Guyana=Georgetown;Haiti=Port-au-Prince;
Honduras=Tegucigalpa;Hungary=Budapest;Iceland=Reykjavik;India=New Delhi;
Indonesia=Jakarta;Iran=Tehran;Iraq=Baghdad;Ireland=Dublin;
Israel=Jerusalem;Italy=Rome;the Ivory Coast=Yamoussoukro;Jamaica=Kingston;
Japan=Tokyo;Jordan=Amman;Kazakhstan=Astana;Kenya=Nairobi;Kiribati=Tarawa;
Kosovo=Pristina;Kuwait=Kuwait City;Kyrgyzstan=Bishkek;Laos=Vientiane;
Latvia=Riga;Lebanon=Beirut;Lesotho=Maseru;Liberia=Monrovia;Libya=Tripoli;
Liechtenstein=Vaduz;Lithuania=Vilnius;Luxembourg=Luxembourg;
Madagascar=Antananarivo;Malawi=Lilongwe;Malaysia=Kuala Lumpur;
the Maldives=Male;Mali=Bamako;Malta=Valletta;the Marshall Islands=Majuro;
Mauritania=Nouakchott;Mauritius=Port Louis;Mexico=Mexico City;
Micronesia=Palikir;Moldova=Chisinau;Monaco=Monaco;Mongolia=Ulaanbaatar;
Montenegro=Podgorica;Morocco=Rabat;Mozambique=Maputo;Myanmar=Naypyidaw;
Namibia=Windhoek;Nauru=Yaren;Nepal=Kathmandu;the Netherlands=Amsterdam;
New Zealand=Wellington;Nicaragua=Managua;Niger=Niamey;Nigeria=Abuja;
North Korea=Pyongyang;North Macedonia=Skopje;Norway=Oslo;Oman=Muscat;
Pakistan=Islamabad;Palau=Ngerulmud;Panama=Panama City;
Papua New Guinea=Port Moresby;Paraguay=Asuncion;Peru=Lima;
the Philippines=Manila;Poland=Warsaw;Portugal=Lisbon;Qatar=Doha;
the Republic of the Congo=Brazzaville;Romania=Bucharest;Russia=Moscow;
Rwanda=Kigali;Samoa=Apia;San Marino=San Marino;Saudi Arabia=Riyadh;
Senegal=Dakar;Serbia=Belgrade;the Seychelles=Victoria;
Sierra Leone=Freetown;Singapore=Singapore;Slovakia=Bratislava;
Slovenia=Ljubljana;the Solomon Islands=Honiara;Somalia=Mogadishu;
South Africa=Pretoria;South Korea=Seoul;South Sudan=Juba;Spain=Madrid;
Sri Lanka=Colombo;Sudan=Khartoum;Suriname=Paramaribo;Sweden=Stockholm;
Switzerland=Bern;Syria=Damascus;Taiwan=Taipei;Tajikistan=Dushanbe;
Tanzania=Dodoma;Thailand=Bangkok;Togo=Lome;Tonga=Nuku'alofa;
Trinidad and Tobago=Port of Spain;Tunisia=Tunis;Turkey=Ankara;
Turkmenistan=Ashgabat;Tuvalu=Funafuti;Uganda=Kampala;Ukraine=Kyiv;
the United Arab Emirates=Abu Dhabi;the United Kingdom=London;
the United States=Washington;Uruguay=Montevideo;Uzbekistan=Tashkent;
Vanuatu=Port Vila;Venezuela=Caracas;Vietnam=Hanoi;Yemen=Sanaa;
Zambia=Lusaka;Zimbabwe=Harare
"""
CAPITALS: list[tuple[str, str]] = [
    (country, capital)
    for country, capital in (entry.strip().split("=") for entry in _CAPITALS.replace("\n", "").split(";"))
]

NAMES = (
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga "
    "Paul Quinn Rosa Sam Tina Uma Victor Wanda Xavier Yara Zoe Alice Bob Carol "
    "Dan Eva Frank Gina Hugo Iris John Karen Lucas Maria Nina Oscar Peter Rita "
    "Simon Tom Ursula Vera Will Amir Bella Chen Diego Elif Fatima Goran Hana Ivan "
    "Jamal Kofi Lena Mary Nadia Omar Priya Ravi Sofia Tariq Yuki Lars Ingrid Mateo "
    "Aisha Kenji Lucy Max Ella Adam Sarah James Linda Robert Laura Mark Julia"
).split()

CITIES = (
    "Hamburg Munich Lyon Nice Milan Naples Turin Porto Seville Valencia Bilbao "
    "Bristol Leeds York Oxford Glasgow Cork Galway Bergen Aarhus Malmo Tampere "
    "Krakow Gdansk Brno Graz Basel Geneva Zurich Rotterdam Ghent Boston Chicago "
    "Denver Dallas Seattle Austin Toronto Montreal Sydney Perth Osaka Kyoto "
    "Mumbai Chennai Karachi Lagos Durban Istanbul Izmir Miami Houston Phoenix"
).split()

ANIMALS = (
    "fox bear rabbit owl mouse cat dog hedgehog squirrel frog duck turtle wolf "
    "lion elephant penguin horse sheep goat hen crow swan otter beaver deer "
    "badger dragon snail bee butterfly whale dolphin tiger monkey parrot donkey"
).split()

WORDS = (
    "apple banana cherry lemon orange grape melon peach plum pear tomato potato "
    "carrot onion garlic pepper bread butter cheese honey sugar water milk coffee "
    "table chair window door house garden kitchen bridge river mountain forest "
    "island ocean beach desert valley village city street market school library "
    "teacher doctor farmer sailor painter baker singer friend brother sister "
    "mother father child family summer winter spring autumn morning evening night "
    "monday tuesday thunder lightning rain snow cloud wind storm sun moon star "
    "planet rocket engine wheel train plane boat bicycle hammer needle thread "
    "basket bottle candle carpet clock crown diamond feather flower flute guitar "
    "piano violin drum lamp letter mirror paper pencil picture pillow pocket ring "
    "rope shoe silver gold copper stone sword ticket tower towel umbrella vase "
    "wallet yellow purple green white black brown little happy quiet brave clever "
    "strong gentle simple secret magic wonder journey story language computer "
    "memory token page model paged attention cache batch world hello python jax "
    "zebra giraffe kangaroo crocodile camel eagle falcon sparrow pigeon spider"
).split()

OPPOSITES = (
    "hot=cold big=small up=down left=right day=night black=white fast=slow "
    "old=new happy=sad open=closed early=late light=dark high=low rich=poor "
    "strong=weak soft=hard full=empty wet=dry clean=dirty long=short near=far "
    "inside=outside loud=quiet easy=difficult thick=thin deep=shallow true=false "
    "first=last good=bad front=back"
)
OPPOSITE_PAIRS: list[tuple[str, str]] = [(pair.split("=")[0], pair.split("=")[1]) for pair in OPPOSITES.split()]

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = ("January February March April May June July August September October November December").split()

COLOURS = "red blue green yellow white black brown grey golden silver".split()

# Sound parts of made-up names, cities and code words.
ONSETS = "b c d f g h j k l m n p r s t v w z br dr gr kr pl sk st tr".split()
VOWELS = "a e i o u a e i o u ai ea".split()
CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "k", "x"]
